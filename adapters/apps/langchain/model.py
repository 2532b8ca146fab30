"""A LangChain model that uses fakevllm: OPENAI_BASE_URL and OPENAI_API_KEY name the proxy."""

from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="app-model")
