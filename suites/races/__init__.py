"""Whatever one stream writes, reads or lets go of, other streams touch only once they have waited for it."""
