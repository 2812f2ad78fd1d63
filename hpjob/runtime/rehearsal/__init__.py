"""Any rank of any plan alone on one device: real kernels and memory, no peers."""
