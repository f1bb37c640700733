"""A file of requests that the server works through as a batch, while nothing else waits."""

import json
import os
import time

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("QUIRE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("QUIRE_KEY", "none"),
)
model = client.models.list().data[0].id
lines = [
    {
        "custom_id": f"story-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": "user", "content": f"Tell me story {number}."}],
            "max_tokens": 16,
            "temperature": 0,
        },
    }
    for number in range(3)
]

data = "\n".join(map(json.dumps, lines)).encode()
file = client.files.create(file=("stories.jsonl", data), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status in ("validating", "in_progress", "finalizing"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(f"{batch.status}: {batch.request_counts.completed} of {batch.request_counts.total}")
for line in client.files.content(batch.output_file_id).text.splitlines():
    entry = json.loads(line)
    print(f"{entry['custom_id']}: {entry['response']['body']['choices'][0]['message']['content']}")
