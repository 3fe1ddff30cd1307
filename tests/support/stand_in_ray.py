"""A module in the place of `ray`, for tests."""

import concurrent.futures
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace


class StandInRay:
    """As much of Ray as prunekit asks for: tasks run in threads of this process."""

    def __init__(self):
        self.calls, self.asked, self.running, self.tasks = [], None, False, None

    def is_initialized(self):
        return self.running

    def init(self, address=None, log_to_driver=True):
        self.calls.append(("init", address))
        self.running, self.tasks = True, ThreadPoolExecutor(4)

    def remote(self, function):
        def start(*arguments):
            return self.tasks.submit(function, *arguments)

        def options(**asked):
            self.asked = asked
            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    def put(self, shared):
        return shared

    def wait(self, references, num_returns, timeout):
        done = concurrent.futures.wait(references, timeout, concurrent.futures.FIRST_COMPLETED).done
        return list(done)[:num_returns], [one for one in references if one not in done]

    def get(self, reference):
        return reference.result()

    def cancel(self, reference, force):
        self.calls.append(("cancel", force))

    def shutdown(self):
        self.calls.append(("shutdown",))
        self.running = False
