"""Vectors of texts, and the text that is nearest to a question. Use a model that was trained for it."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("QUIRE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("QUIRE_KEY", "none"),
)
model = client.models.list().data[0].id
texts = ["The ship sailed at dawn.", "She opened the letter.", "Rain fell on the moor."]
question = "The ship sailed in the morning."

answer = client.embeddings.create(model=model, input=[question, *texts])
asked, *others = (item.embedding for item in answer.data)
# Vectors have length 1, so that the product of two is the cosine of their angle.
scores = [sum(a * b for a, b in zip(asked, other, strict=True)) for other in others]
for score, text in sorted(zip(scores, texts, strict=True), reverse=True):
    print(f"{score:.3f}  {text}")
