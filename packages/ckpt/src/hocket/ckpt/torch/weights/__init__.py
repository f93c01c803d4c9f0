"""Published weights of PyTorch: the publisher, and a follower that updates tensors in place."""
