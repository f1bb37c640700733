"""Work that outlives the connection that asked for it: files, batches and background responses.

This package calls an ASGI application as any client would, and knows nothing else of it: `jobs_of` returns an
`Extension` that is mounted on the API or on a gateway.

extension   what is mounted, from settings
routes      ``/v1/files`` and ``/v1/batches``
upload      multipart forms, streamed to disk
files       the uploaded and written files on disk
lines       the lines of a batch's input and output
runner      runs batches, and continues them after a restart
background  responses that run without their client
"""
