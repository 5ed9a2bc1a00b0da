"""langchain-openai under langchain's own suite for chat models; what the model says is scripted by test."""

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from server import BASE_URL, KEY, MODEL, call_script, script

JOKE = script('{"setup": "Why do cats purr?", "punchline": "They ', 'can."}')
MAGIC = call_script("magic_function", {"input": 3})
ANSWERS = {
    "test_tool_calling": MAGIC,
    "test_tool_calling_async": MAGIC,
    "test_tool_choice": MAGIC,
    "test_tool_calling_with_no_arguments": call_script("magic_function_no_args", {}),
    "test_bind_runnables_as_tools": call_script("greeting_generator", {"answer_style": "pirate"}),
    "test_structured_few_shot_examples": call_script("my_adder_tool", {"a": 3, "b": 4}),
    "test_structured_output": JOKE,
    "test_structured_output_async": JOKE,
    "test_structured_output_optional_param": JOKE,
    "test_json_mode": JOKE,
}
"""By test; the others get the words of the question back."""


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {"model": MODEL, "base_url": BASE_URL, "api_key": KEY, "stream_usage": True}

    @pytest.fixture
    def model(self, request):
        extra = getattr(request, "param", None) or {}
        headers = ANSWERS.get(request.node.originalname)
        return ChatOpenAI(
            **{**self.standard_chat_model_params, **self.chat_model_params, **extra},
            default_headers=headers,
        )

    @property
    def structured_output_kwargs(self):
        return {"method": "json_schema"}

    @property
    def supports_json_mode(self):
        return True

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": [], "stream": []}

    @pytest.mark.xfail(reason="the scripted model gives one answer, asked for a call and for text")
    def test_structured_output_pydantic_2_v1(self, model):
        super().test_structured_output_pydantic_2_v1(model)

    @pytest.mark.xfail(reason="the scripted model gives one answer to every turn of a loop")
    def test_agent_loop(self, model):
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="the scripted model gives one answer whatever it is shown")
    def test_unicode_tool_call_integration(self, model):
        super().test_unicode_tool_call_integration(model)
