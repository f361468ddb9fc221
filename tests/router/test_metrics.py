from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers import CHAT, model_server, post, routed


async def test_metrics() -> None:
    async with routed(model_server("m")) as (url, urls, session):
        await post(url, CHAT)
        await post(url, "/live")
        async with session.get("/metrics") as response:
            text = await response.text()
    samples = {
        (sample.name, sample.labels.get("status")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    answers = samples["reward_loop_router_answers_total", "200"]
    assert (answers.value, answers.labels["worker"], answers.labels["model"]) == (1, urls[0], "m")
    assert samples["reward_loop_router_refused_total", "405"].value == 1
    assert samples["reward_loop_router_worker_up", None].value == 1
    assert samples["reward_loop_router_latency_seconds_total", None].value > 0
    assert samples["reward_loop_router_worker_in_flight", None].value == 0
