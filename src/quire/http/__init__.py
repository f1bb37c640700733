"""The HTTP manners that the API, the admin surface, the jobs and a gateway share. No engine, no torch.

wire      bytes from strangers as typed values: every name known, every type strict
body      reading bodies under limits; JSON answers, lists of pages, server-sent events
refusals  exceptions as answers in the error form of OpenAI or Anthropic
edge      request ids, keys, browsers; errors that reach a router
client    calls to an application of this process
listen    sockets
heartbeat registering at a gateway
drain     uvicorn, from the first request to a drained exit
"""
