"""The HTTP manners that the API, the admin surface, the jobs and a gateway share. No engine, no torch.

wire      bytes from strangers as typed values: every name known (`field_rules`), every type strict
body      reading bodies under limits (`long_body`: in pieces); JSON answers (`json_page`), `events`
refusals  exceptions as answers in the error form of OpenAI or Anthropic; `router_errors`
edge      which wrappers a request passes, its name; `rights`: keys, and for whom it runs
client    calls to an application of this process
listen    sockets
heartbeat registering at a gateway
limits    the table of what one request may hold
front     a process that answers probes and accepts connections; front_link is the server's side
drain     uvicorn, from the first request to a drained exit
"""
