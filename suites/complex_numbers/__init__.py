"""Complex numbers: parameters and buffers of them train as others do, imaginary parts included."""
