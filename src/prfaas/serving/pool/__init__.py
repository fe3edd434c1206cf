"""The prefix-cache pool of a machine: a daemon that keeps pages of KVCache in shared memory and on SSD."""
