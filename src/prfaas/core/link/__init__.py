"""A link between clusters as it is measured: samples of both its ends in; capacity, congestion and condition out."""
