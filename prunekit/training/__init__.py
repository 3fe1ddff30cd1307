"""Everything that runs on the device inside or around a training step."""
