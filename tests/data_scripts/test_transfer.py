import email.utils
import hashlib
import http.client
import io
import ssl
import time
import urllib.error
import urllib.request

import pytest

from data_scripts import transfer
from data_scripts.download import Patience, Remote, download
from data_scripts.partial import DownloadError
from tests import faulty_server as faulty
from tests.faulty_server import CONTENT, OTHER, download_from, interrupted


@pytest.mark.parametrize(
    ("content_range", "body"),
    [
        ("bytes 19999-49999/50000", CONTENT[19_999:]),  # begins elsewhere
        ("bytes 0-49999/50000", CONTENT),
        ("bytes 20000-59999/60000", OTHER[20_000:]),  # of another size
        ("bytes 20000-50000/50000", CONTENT[20_000:] + b"x"),  # ends behind the end
        ("bytes 20000-19999/50000", b""),
        ("bytes 20000-49999/*", CONTENT[20_000:]),
        ("chunks 1-2/3", CONTENT[20_000:]),
        (None, CONTENT[20_000:]),
    ],
)
def test_lies_about_ranges_are_refused(server, target, patience, content_range, body):
    interrupted(server, target, 20_000)
    server.faults = [faulty.lie(content_range, body)]
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=20000-", None]


@pytest.mark.parametrize("changed", [{"ETag": '"second"'}, {"Last_Modified": "Tue, 07 Aug 2018 10:00:00 GMT"}])
def test_rest_of_another_version_is_refused(server, target, patience, changed):
    interrupted(server, target, 20_000)
    server.faults = [faulty.lie("bytes 20000-49999/50000", OTHER[20_000:50_000], **changed)]
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=20000-", None]


def test_unasked_range_is_refused(server, target, patience):
    server.faults = [faulty.lie("bytes 0-49999/50000", CONTENT)]
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, None]


@pytest.mark.parametrize("more", [b"", b"more than stated"])
def test_short_range_is_continued(server, target, patience, more):
    interrupted(server, target, 20_000)
    server.faults = [faulty.lie("bytes 20000-29999/50000", CONTENT[20_000:30_000] + more)]
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=20000-", "bytes=30000-"]


@pytest.mark.parametrize("kind", ["etag", "date"])
def test_new_version_between_attempts_starts_over(server, target, patience, kind):
    server.etag = '"first"' if kind == "etag" else None
    server.faults = [faulty.cut(20_000)]

    def publish(_: float) -> None:
        server.content = OTHER
        server.etag = '"second"' if kind == "etag" else None
        server.last_modified = "Tue, 07 Aug 2018 10:00:00 GMT"

    receipt = download(Remote(server.url), target, patience=Patience(sleep=publish), progress=False)
    assert target.read_bytes() == OTHER
    assert receipt.md5 == hashlib.md5(OTHER).hexdigest()
    assert server.ranges == [None, "bytes=20000-"]
    assert server.served[1] == len(OTHER)


@pytest.mark.parametrize("etag", [None, 'W/"weak"', '"caf\xe9"'])
def test_without_a_validator_nothing_is_continued(server, target, patience, etag):
    server.etag, server.last_modified = etag, None
    server.faults = [faulty.cut(20_000)]
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, None]


def test_unsatisfiable_range_starts_over(server, target, patience):
    interrupted(server, target, 20_000)
    server.faults = [faulty.status(416)]
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=20000-", None]


def test_transient_statuses_are_tried_again_with_growing_waits(server, target, patience, waits):
    server.faults = [faulty.status(500), faulty.status(503), faulty.status(408)]
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
    for wait, longest in zip(waits, (1, 2, 4), strict=True):
        assert longest / 2 <= wait <= longest


def test_transient_status_for_ever_is_given_up(server, target, waits):
    server.faults = [faulty.status(500)] * 20
    with pytest.raises(DownloadError, match=r"gave up after 12 attempts.*status 500"):
        download_from(server, target, Patience(attempts=12, sleep=waits.append))
    assert len(server.ranges) == 12
    assert max(waits) <= 60


@pytest.mark.parametrize(
    ("retry_after", "low", "high"), [("7", 7, 7), ("999999", 300, 300), ("0", 0.5, 1), ("soon", 0.5, 1), ("-5", 0.5, 1)]
)
def test_retry_after_is_respected_within_a_bound(server, target, patience, waits, retry_after, low, high):
    server.faults = [faulty.status(429, Retry_After=retry_after)]
    download_from(server, target, patience)
    assert low <= waits[0] <= high


def test_retry_after_may_be_a_date(server, target, patience, waits):
    server.faults = [faulty.status(503, Retry_After=email.utils.formatdate(time.time() + 100, usegmt=True))]
    download_from(server, target, patience)
    assert 90 <= waits[0] <= 101


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (404, "check the address"),
        (403, "not public"),
        (401, "needs a login"),
        (410, "taken away"),
        (400, "use another"),
    ],
)
def test_refusals_fail_at_once(server, target, patience, waits, code, remedy):
    server.faults = [faulty.status(code)]
    with pytest.raises(DownloadError, match=f"status {code} .*{remedy}"):
        download_from(server, target, patience)
    assert waits == []
    assert len(server.ranges) == 1


@pytest.mark.parametrize("place", ["file:///etc/hostname", "ftp://127.0.0.1/a.tar", "data:,abc", "gopher://127.0.0.1/"])
def test_redirect_to_other_schemes_is_refused(server, target, patience, waits, place):
    server.faults = [faulty.status(302, Location=place)]
    with pytest.raises(DownloadError, match=f"(?i)status 302 .*{place}.* is not allowed"):
        download_from(server, target, patience)
    assert waits == []
    assert len(server.ranges) == 1


def test_redirect_to_http_is_followed_and_resumed(server, target, patience):
    with faulty.running(OTHER) as front:
        elsewhere = faulty.status(307, Location=server.url + "/real.tar")
        front.faults = [elsewhere, elsewhere]
        server.faults = [faulty.cut(20_000)]
        download_from(front, target, patience)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=20000-"]


@pytest.mark.parametrize(("place", "allowed"), [("https://b/a", True), ("http://b/a", False), ("ftp://b/a", False)])
def test_redirect_from_https_stays_there(place, allowed):
    arguments = (urllib.request.Request("https://b/"), io.BytesIO(), 302, "Found", http.client.HTTPMessage(), place)
    if allowed:
        request = transfer._Redirects().redirect_request(*arguments)
        assert request is not None
        assert request.full_url == place
    else:
        with pytest.raises(urllib.error.HTTPError, match=f"redirection to {place} is not allowed"):
            transfer._Redirects().redirect_request(*arguments)


def test_invalid_certificate_fails_at_once(server, target, patience, waits, monkeypatch):
    refusal = ssl.SSLCertVerificationError("verify failed")
    refusal.verify_message = "certificate has expired"

    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError(refusal)

    monkeypatch.setattr(transfer._OPENER, "open", refuse)
    with pytest.raises(DownloadError, match=r"certificate is not valid \(certificate has expired\)"):
        download_from(server, target, patience)
    assert waits == []


def test_redirect_loop_is_refused(server, target, patience):
    server.faults = [faulty.status(302, Location="/a.tar")] * 30
    with pytest.raises(DownloadError, match=r"status 302 .*infinite loop") as failure:
        download_from(server, target, patience)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "url", ["file:///etc/hostname", "ftp://127.0.0.1/a", "a.tar", "http:///a", "http://h:99999/a", "http://h/a b"]
)
def test_bad_addresses_are_refused(target, url):
    with pytest.raises(ValueError, match=r"address|Port"):
        download(Remote(url), target)
    assert not target.parent.exists()


def test_server_that_is_not_there(target, patience, waits):
    with faulty.running(CONTENT) as gone:
        pass
    with pytest.raises(DownloadError, match=r"gave up after 4 attempts .*refused"):
        download_from(gone, target, patience)


def test_answers_that_cannot_be_used(server, target, patience):
    server.faults = [lambda handler: handler.start(200, None)]
    with pytest.raises(DownloadError, match="without a size"):
        download_from(server, target, patience)
    server.faults = [lambda handler: handler.start(200, 50, Content_Encoding="gzip")]
    with pytest.raises(DownloadError, match="recompressed"):
        download_from(server, target, patience)


def test_garbage_instead_of_http_is_tried_again(server, target, patience):
    server.faults = [lambda handler: handler.wfile.write(b"garbage\r\n\r\n") and None]
    download_from(server, target, patience)
    assert target.read_bytes() == CONTENT
