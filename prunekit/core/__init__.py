"""The training core: what runs on the device inside or around a training step."""
