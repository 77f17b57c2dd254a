"""APIs as pure translations: bytes to structs, deltas to bytes.

Contract of this folder: OpenAI's, Anthropic's and Responses' bodies and answers, and the OpenAPI document. No IO, no
gateway.
"""
