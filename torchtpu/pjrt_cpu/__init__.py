"""TorchTPU without a TPU: a shim that presents XLA's CPU plugin as the `tpu` device."""
