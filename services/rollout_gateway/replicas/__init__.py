"""Several processes as one gateway: the head that holds its addresses, and its replicas."""
