"""The ``.kvc`` store: segments of checksummed pages on local disk.

Contract of this folder: files only, no policy and no network. ``store`` is its face, ``format`` the bytes of a file.
"""
