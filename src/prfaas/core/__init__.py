"""Pure: no sockets, threads, event loop or clock. What the live system and the offline answers share."""
