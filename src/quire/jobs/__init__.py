"""Work that outlives the connection that asked for it: files, batches and background responses.

This package calls an ASGI application as any client would, and knows nothing else of it: `jobs_of` returns an
`Extension` that is mounted on the API or on a gateway.

routes      ``/v1/files`` and ``/v1/batches``; what is mounted, from settings
message_batches  Anthropic's batches, on the same runner
disk        what is kept on disk, and what happens while it is full
files       the uploaded and written files on disk; multipart forms
runner      runs batches, and continues them after a restart; the lines of their input and output
background  responses that run without their client
"""
