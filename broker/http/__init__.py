"""HTTP without OpenAI: sockets, the protocol object below uvicorn, and the cycle of one exchange.

Contract of this folder: knows no API and no gateway; imports ``subjects`` only.
"""
