"""Batchserve: an HTTP microservice for offline batch inference with vLLM.

A request is stamped and validated in ``api``, resolved into token ids and sampling settings by a backend on a thread
of its own, waits in ``batching`` for its window, goes with that window through one ``LLM.generate()`` on the engine
thread, and comes back over one hop to the event loop, where ``timings`` turns its stamps into the reply. OpenAI's
answers are shaped by the backend on one more thread. Dependencies run one way: ``api`` → ``batching`` → ``backends``
→ (``prompts``, ``request``, ``timings``, ``errors``).
"""
