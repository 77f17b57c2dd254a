"""Engines behind one small protocol (WRK-2): vLLM, any OpenAI-compatible server, and a simulated one."""
