"""Keys open what their role may do, are kept as hashes only, and stop working when they are revoked."""

import contextlib
import re
import resource
import stat
from collections.abc import Iterator

import httpx

from gateway.domain.accounts.services import KEY_PREFIX
from tests.conftest import StartWorker
from tests.fakes.gateway import ADMIN_KEY, GatewayUnderTest, assert_error, chat_body, script_header
from tests.fakes.wire import GatewayPeer
from tests.integration.conftest import StartGateway
from workers.engine.scripted import HANG
from workers.protocol import PAYLOAD_FIELD, GenerateRequest, decode

KEYS = "/admin/api/keys"


def as_holder(gateway: GatewayUnderTest, key: str, path: str = "/v1/models") -> httpx.Response:
    return httpx.get(gateway.url + path, headers={"authorization": f"Bearer {key}"})


def test_a_key_from_birth_to_revocation(start_gateway: StartGateway):
    gateway = start_gateway(key_cache_s="0")
    made = gateway.client.post(KEYS, json={"name": "ci"})
    assert made.status_code == 201
    key, key_id = made.json()["key"], made.json()["id"]
    assert key.startswith(KEY_PREFIX)
    assert as_holder(gateway, key).status_code == 200
    assert_error(as_holder(gateway, key, KEYS), 403, code="insufficient_permissions")
    listed = gateway.client.get(KEYS).json()["data"]
    assert [(item["name"], item["role"]) for item in listed[1:]] == [("ci", "member")]
    assert key not in gateway.client.get(KEYS).text
    assert gateway.client.delete(f"{KEYS}/{key_id}").status_code == 204
    assert_error(as_holder(gateway, key), 401, code="invalid_api_key")
    for path in gateway.data_dir.iterdir():
        assert key.encode() not in path.read_bytes()


def test_mistakes_of_an_admin(start_gateway: StartGateway):
    gateway = start_gateway()
    assert_error(gateway.client.post(KEYS, json={}), 400, param="name")
    assert_error(gateway.client.post(KEYS, json={"name": "x", "role": "king"}), 400, param="role")
    for content in (b"", b"{", b"[]", b"null"):
        error = assert_error(gateway.client.post(KEYS, content=content), 400)
        assert error["message"].startswith("The body must be a JSON object")
        assert "CreateKey" not in error["message"]
    nobody = "00000000-0000-0000-0000-000000000000"
    assert_error(gateway.client.delete(f"{KEYS}/{nobody}"), 404, param="key_id")


def test_the_first_start_makes_an_admin_key_and_shows_it_once(start_gateway: StartGateway):
    gateway = start_gateway(admin_key="")
    path = gateway.data_dir / "admin.key"
    key = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((gateway.data_dir / "secret.key").stat().st_mode) == 0o600
    assert re.findall(r"tpg-[\w-]+", gateway.output) == [key]
    line = next(line for line in gateway.output.splitlines() if key in line)
    assert line.startswith("The admin's API key")
    assert as_holder(gateway, key, KEYS).status_code == 200
    gateway.kill()
    again = start_gateway(admin_key="", data_dir=gateway.data_dir)
    assert as_holder(again, key, KEYS).status_code == 200
    assert key not in again.output


def test_the_environment_replaces_the_admin_key(start_gateway: StartGateway):
    first = start_gateway()
    first.kill()
    new_key = "tpg-another-admin-key-0002"
    second = start_gateway(admin_key=new_key, data_dir=first.data_dir)
    assert as_holder(second, new_key, KEYS).status_code == 200
    assert_error(second.client.get(KEYS), 401, code="invalid_api_key")


def admin_key_id(gateway: GatewayUnderTest, last4: str) -> str:
    listed = gateway.client.get(KEYS).json()["data"]
    return next(item["id"] for item in listed if item["last4"] == last4)


def test_a_revoked_admin_key_stays_revoked(start_gateway: StartGateway):
    first = start_gateway(key_cache_s="0")
    made = first.client.post(KEYS, json={"name": "other", "role": "admin"}).json()["key"]
    key_id = admin_key_id(first, ADMIN_KEY[-4:])
    assert first.client.delete(f"{KEYS}/{key_id}").status_code == 204
    first.kill()
    second = start_gateway(data_dir=first.data_dir)
    assert_error(second.client.get(KEYS), 401, code="invalid_api_key")
    assert second.output.count("is revoked") == 1
    second.kill()
    new_key = "tpg-another-admin-key-0002"
    third = start_gateway(admin_key=new_key, data_dir=first.data_dir)
    assert_error(third.client.get(KEYS), 401, code="invalid_api_key")
    for key in (new_key, made):
        assert as_holder(third, key, KEYS).status_code == 200


def test_a_revoked_key_of_the_first_start_stays_revoked(start_gateway: StartGateway):
    first = start_gateway(admin_key="")
    key = (first.data_dir / "admin.key").read_text()
    headers = {"authorization": f"Bearer {key}"}
    (row,) = httpx.get(first.url + KEYS, headers=headers).json()["data"]
    assert httpx.delete(f"{first.url}{KEYS}/{row['id']}", headers=headers).status_code == 204
    first.kill()
    second = start_gateway(admin_key="", data_dir=first.data_dir)
    assert_error(as_holder(second, key, KEYS), 401, code="invalid_api_key")


def test_the_first_admin_keys_name_is_its_own(start_gateway: StartGateway):
    gateway = start_gateway()
    refused = gateway.client.post(KEYS, json={"name": "admin (first start)"})
    assert_error(refused, 400, param="name")


def test_a_name_with_nul(start_gateway: StartGateway):
    gateway = start_gateway()
    refused = gateway.client.post(KEYS, json={"name": "a\0b"})
    error = assert_error(refused, 400, param="name")
    assert "NUL" in error["message"]


def test_a_database_that_cannot_grow(start_gateway: StartGateway):
    gateway = start_gateway()
    before = resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    refused = gateway.client.post(KEYS, json={"name": "a-telling-name"})
    error = assert_error(refused, 503, type="server_error")
    assert "database" in error["message"]
    resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, before)
    assert gateway.client.post(KEYS, json={"name": "x"}).status_code == 201
    for secret in ("a-telling-name", "INSERT", "Traceback"):
        assert secret not in gateway.output


def test_requests_tell_workers_whose_they_are(
    start_gateway: StartGateway, start_worker: StartWorker, peer: GatewayPeer
):
    """Rows are shared fairly between keys, and no key can tell from times what another one asked."""
    start_worker("a")
    gateway = start_gateway()
    gateway.wait_for_ready()
    made = gateway.client.post(KEYS, json={"name": "ci"}).json()
    ids = [key["id"] for key in gateway.client.get(KEYS).json()["data"]]
    answers: list[Iterator[bytes]] = []  # an iterator that is let go hangs up
    with contextlib.ExitStack() as stack:
        for key in (ADMIN_KEY, made["key"]):
            headers = {"authorization": f"Bearer {key}", **script_header(["go ", HANG])}
            body = chat_body(stream=True, fair_key="mine", cache_salt="mine")
            url = gateway.url + "/v1/chat/completions"
            answer = httpx.stream("POST", url, json=body, headers=headers)
            answers.append(stack.enter_context(answer).iter_bytes())
            next(answers[-1])
        payloads = [fields[PAYLOAD_FIELD] for _, fields in peer.redis.xrange(peer.stream)]
    requests = [decode(GenerateRequest, payload) for payload in payloads]
    assert [request.fair_key for request in requests] == ids
    assert [request.cache_salt for request in requests] == ids
