"""Several gateways of one deployment: who is there, who leads, and what all of them must know."""
