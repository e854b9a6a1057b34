"""Complex numbers: complex parameters and buffers train like others, imaginary parts included."""
