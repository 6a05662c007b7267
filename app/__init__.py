"""Batchserve: an HTTP microservice for offline batch inference with vLLM.

A request is stamped and validated in ``api``, resolved into token ids and sampling settings by a backend on a thread
of its own, its images and audio fetched and decoded in ``media`` on the way, and waits in ``batching``. From there it
goes with its window through one ``LLM.generate()`` on the engine thread, or by itself, there or through ``AsyncLLM``,
and its tokens are streamed as they are made; and comes back to the event loop, where ``timings`` turns its stamps into
the reply. OpenAI's answers are shaped by the backend, whole ones on one more thread. Dependencies run one way: ``api``
→ ``batching`` → ``backends`` → (``media``, ``prompts``, ``request``, ``timings``, ``errors``).
"""
