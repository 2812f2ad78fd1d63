"""Any layout against one plain process: the same losses, gradients and weights."""
