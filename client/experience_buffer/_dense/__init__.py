"""Lists, arrays and tensors as dense memory, and that memory as arrays and tensors: nothing is lost."""
