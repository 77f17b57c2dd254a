"""Codecs of KV pages: none, lossless, fp8, int4, and conversion between precisions of one model."""
