import pytest

from reward_loop import ConfigError, NaiveRewardLoopManager
from reward_loop._util.addresses import checked_address, proxy_of, url_of
from reward_loop.client import Judge, Number

CHAT = "/v1/chat/completions"
AZURE = "https://x.openai.azure.com/openai/deployments/d"


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1/chat/completions"),
        ("127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1/chat/completions"),
        (" 127.0.0.1:8000\n", "http://127.0.0.1:8000/v1/chat/completions"),
        ("[::1]:8000", "http://[::1]:8000/v1/chat/completions"),
        ("http://judge:8000//", "http://judge:8000/v1/chat/completions"),
        ("https://api.openai.com/v1", "https://api.openai.com/v1/chat/completions"),
        ("https://api.openai.com/v1/chat/completions", "https://api.openai.com/v1/chat/completions"),
        ("https://host/openai/v2/", "https://host/openai/v2/chat/completions"),
        (f"{AZURE}?api-version=2024-10-21", f"{AZURE}/chat/completions?api-version=2024-10-21"),
        (f"{AZURE}/chat/completions?api-version=1", f"{AZURE}/chat/completions?api-version=1"),
        ("https://host/models?api-version=1", "https://host/models/chat/completions?api-version=1"),
        ("HTTP://Judge:8000/v1", "http://Judge:8000/v1/chat/completions"),
        ("me:password@[::1]:8000/", "http://me:password@[::1]:8000/v1/chat/completions"),
        ("https://host?key=1", "https://host/v1/chat/completions?key=1"),
    ],
)
def test_the_url_of_an_endpoint(address, url):
    assert url_of(address, CHAT) == url
    assert url_of(checked_address(address), CHAT) == url


def test_other_endpoints():
    assert url_of("judge:8000/v1", "/classify") == "http://judge:8000/classify"
    assert url_of("http://judge:8000/classify", "/classify") == "http://judge:8000/classify"
    assert url_of("https://gateway/score", "/classify") == "https://gateway/score/classify"
    assert checked_address("judge:8000/v1/") == "judge:8000"


@pytest.mark.parametrize("address", [None, ""])
def test_a_missing_address_is_an_error_that_names_the_option(address):
    with pytest.raises(ConfigError, match="reward_router_address"):
        url_of(address, "/classify")


@pytest.mark.parametrize(
    "address",
    [
        "http://",
        "ftp://127.0.0.1:1",
        "127.0.0.1:",
        "http://127.0.0.1:99999",
        "[::1",
        "judge:8000/openai",
        "judge:8000?a=b",
        "http://judge:8000/v1#part",
        "http://judge:8000 http://other:8000",
        "https://host/v1/models",
        "api.openai.com/v1",
        "judge",
        "http://judge..example:80",
        "http://judge\\x:80",
        "judge\u200b:8000",
        "/v1",
    ],
)
def test_a_malformed_address_is_an_error_before_the_first_row(address):
    for use in (
        lambda: url_of(address, CHAT),
        lambda: Judge("{{answer}}", Number(1, 10), address=address),
        lambda: NaiveRewardLoopManager(compute_score=lambda solution_str: 1.0, reward_router_address=address),
    ):
        with pytest.raises(ConfigError, match="not a valid address"):
            use()


@pytest.mark.parametrize(
    "address",
    [
        "http://me:secret@judge:8000/#x",
        "me:secret@judge:8000/x",
        "http://me:a@secret@judge:0",
        "http://me:sec/secret@judge",
    ],
)
def test_an_error_does_not_show_a_password(address):
    with pytest.raises(ConfigError) as raised:
        url_of(address, "/classify")
    assert "sec" not in str(raised.value)


def test_a_manager_gives_the_function_the_plain_address():
    manager = NaiveRewardLoopManager(compute_score=lambda solution_str: 1.0, reward_router_address="judge:8000/v1/")
    assert manager.reward_router_address == "judge:8000"


@pytest.fixture
def proxies(monkeypatch):
    for variable in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", "proxy:3128")
    monkeypatch.setenv("https_proxy", "http://secure:3129")


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://judge.example/v1/chat/completions", "http://proxy:3128"),
        ("https://api.openai.com/v1/chat/completions", "http://secure:3129"),
        ("http://127.0.0.2:8000/classify", None),
        ("http://[::1]:8000/classify", None),
        ("http://gpu.internal.example:8000/classify", None),
        ("http://other.example:8000/classify", None),
        ("http://other.example:8001/classify", "http://proxy:3128"),
        ("http://10.1.2.3:8000/classify", None),
        ("http://192.168.7.8/classify", None),
        ("http://[fd00::7]:8000/classify", None),
    ],
)
@pytest.mark.parametrize("name", ["NO_PROXY", "no_proxy"])
def test_the_proxy_of_an_address(monkeypatch, proxies, name, url, proxy):
    monkeypatch.setenv(name, "internal.example,other.example:8000, 10.1.0.0/16,192.168.7.8,fd00::/8")
    assert proxy_of(url) == proxy


@pytest.mark.parametrize(
    ("no_proxy", "url", "by_proxy"),
    [
        ("10.0.0.0/8,\tfd00::/8", "http://[fd00::1]:80", False),
        ("10.0.0.0/255.0.0.0", "http://10.2.3.4", False),
        ("10.0.0.0/8", "http://[::ffff:10.2.3.4]:80", False),
        (".corp", "http://JUDGE.Corp", False),
        ("*", "http://judge.corp", False),
        ("judge.corp:8000", "http://judge.corp:8000", False),
        ("", "http://localhost.:8000", False),
        ("", "http://[::ffff:127.0.0.1]:8000", False),
        (".corp", "http://xcorp", True),
        ("[fd00::1]:8000", "http://[fd00::1]:8001", True),
        ("0.0.0.0/0", "http://[fd00::1]", True),
        ("10.0.0.0/99", "http://10.2.3.4", True),
    ],
)
def test_forms_of_no_proxy(monkeypatch, proxies, no_proxy, url, by_proxy):
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert proxy_of(url) == ("http://proxy:3128" if by_proxy else None)


def test_the_proxy_is_an_http_proxy(monkeypatch, proxies):
    monkeypatch.setenv("HTTP_PROXY", " ")
    assert proxy_of("http://judge") is None
    monkeypatch.setenv("HTTP_PROXY", "socks5://me:secret@proxy:1080")
    with pytest.raises(ConfigError, match="http_proxy names a proxy of type socks5"):
        proxy_of("http://judge")
