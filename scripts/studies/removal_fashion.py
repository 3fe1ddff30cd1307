"""Accuracy and LiteRT latency of networks for Fashion-MNIST at half of their multiply-accumulates."""

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from prunekit.delivery.litert.latency import input_arrays, measured_latencies, plain_file
from studies import fashion
from studies.results import Results

NETWORKS = {"ResNet-8": "resnet8", "inverted residuals": "mobilenet"}
EXAMPLES, EPOCHS = 1024, 3
HALF = 0.5
# LiteRT's kernels compute 16 output channels at a time on processors with AVX-512, and fewer take as long.
OPTIONS: dict[str, Any] = {"criterion": "mean_activation", "multiple": 16, "tolerance": None}
WAYS = ("none", "channels", "channels, trained", "a block and channels, trained", "masked groups, trained")
MASKED = 0.5
SECONDS = 20.0
IMAGES_OF_BLOCKS = 256
PAGE = Path("docs/measured/removal-fashion.md")
HEAD = f"""# Measured: half of the arithmetic

Accuracy on the 10,000 test images of Fashion-MNIST, and time of LiteRT (float32, batch 1, one thread), of two networks
without half of their multiply-accumulates. The dense networks are trained for {fashion.EPOCHS} epochs (Adam, learning
rate 0.001, batches of {fashion.BATCH}, seed 0).

- Channels: `pk.shrink(model, macs=0.5, criterion="mean_activation", multiple=16)` reads {EXAMPLES:,} training images
  for the choice of channels and the repair. Kept channels are rounded up, so a little more than half may be left.
- A block and channels: `pk.remove_blocks(model, 1, images)` on {IMAGES_OF_BLOCKS} of the images, then the same
  `pk.shrink` to half of the arithmetic that the dense network has.
- Masked groups: the epochs of training mask whole groups of channels (`policy="channel_groups"`, {MASKED:.0%} of the
  entries, over the first two epochs), and `pk.shrink(model, channels="nonzero")` removes them.
- Trained: {EPOCHS} epochs more, with a learning rate that falls from 0.001 to 0 along a cosine.

Times are ratios of processor time to the dense network, both files in turns for {SECONDS:g} seconds, medians, on a
processor with AVX-512, on which LiteRT computes 16 channels at a time. Test images are used for these accuracies alone.
One run each; "–" is not measured. `scripts/study removal-fashion` makes this page.

| network | removed | MACs | parameters | accuracy | LiteRT time |
|---|---|---|---|---|---|
"""


class Study:
    """Measures what a page shows of one network.

    Args:
        name: A key of `fashion.NETWORKS`.
    """

    def __init__(self, name: str):
        self.name = name
        self.train, self.test = fashion.images("train"), fashion.images("t10k")
        drawn = np.sort(np.random.default_rng(0).choice(len(self.train[1]), EXAMPLES, replace=False))
        self.calibration = tuple(array[drawn] for array in self.train)
        self.results = Results(PAGE.with_suffix(".json"))

    def dense(self) -> Any:
        """The trained dense network."""
        keras.utils.clear_session()
        gc.collect()
        return fashion.trained(keras, self.name, self.train)

    def tuned(self, model: Any, callbacks: Any = ()) -> Any:
        """The model after the epochs of training with a falling learning rate."""
        fashion.compile_network(keras, model)
        rate = keras.optimizers.schedules.CosineDecay(0.001, EPOCHS * fashion.STEPS)
        model.optimizer.learning_rate = rate
        batches = fashion.batches(self.train, 1)
        model.fit(batches, epochs=EPOCHS, steps_per_epoch=fashion.STEPS, verbose=2, callbacks=list(callbacks))
        return model

    def figures(self, model: Any, dense: Any) -> dict[str, Any]:
        """Accuracy, sizes and ratios of time to the dense network."""
        samples = self.calibration[0][:1]
        inputs = [input_arrays(dense, samples)] * 2
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / "dense.tflite", Path(folder) / "smaller.tflite"]
            for file, one in zip(files, (dense, model), strict=True):
                file.write_bytes(plain_file(one, samples))
            ratio, interval = measured_latencies(files, inputs, SECONDS).share(1)
        return {
            "accuracy": fashion.measured(model, self.test)["accuracy"],
            "parameters": model.count_params(),
            "macs": pk.cost(model).macs,
            "ratio": ratio,
            "interval": interval,
        }

    def run(self) -> None:
        """Measures what is missing."""

        def removed(model: Any, share: float = HALF) -> Any:
            return pk.shrink(model, macs=share, data=self.calibration, **OPTIONS)[0]

        def channels(train: bool) -> dict[str, Any]:
            dense = self.dense()
            model = removed(dense)
            return self.figures(self.tuned(model) if train else model, dense)

        def block() -> dict[str, Any]:
            dense = self.dense()
            fewer, _ = pk.remove_blocks(dense, 1, self.calibration[0][:IMAGES_OF_BLOCKS])
            share = HALF * pk.cost(dense).macs / pk.cost(fewer).macs
            return self.figures(self.tuned(removed(fewer, share)), dense)

        def masked() -> dict[str, Any]:
            dense, model = self.dense(), self.dense()
            schedule = pk.schedules.PolynomialDecay(0.0, MASKED, 0, 2 * fashion.STEPS, frequency=104)
            self.tuned(model, [pk.PruningCallback(schedule, policy="channel_groups")])
            return self.figures(pk.shrink(model, channels="nonzero")[0], dense)

        def whole() -> dict[str, Any]:
            dense = self.dense()
            return self.figures(dense, dense)

        measures = (whole, lambda: channels(False), lambda: channels(True), block, masked)
        for title, measure in zip(WAYS, measures, strict=True):
            self.results.get(f"{self.name} / {title}", measure)
            PAGE.write_text(page(self.results), encoding="utf-8")


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    rows = []
    for title, name in NETWORKS.items():
        for way in WAYS:
            one, dense = results.values.get(f"{name} / {way}"), results.values.get(f"{name} / none")
            if one is None or dense is None:
                rows.append(f"| {title} | {way} | – | – | – | – |")
                continue
            shares = [one[key] / dense[key] for key in ("macs", "parameters")]
            rows.append(
                f"| {title} | {way} | {shares[0]:.3f} | {shares[1]:.3f} | {one['accuracy']:.4f} | {one['ratio']:.2f} |"
            )
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    """Measures what is missing, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(NETWORKS.values()), help="one network")
    only = parser.parse_args().only
    for name in NETWORKS.values():
        if only in (None, name):
            Study(name).run()


if __name__ == "__main__":
    main()
