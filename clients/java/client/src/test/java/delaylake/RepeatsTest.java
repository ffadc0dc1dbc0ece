package delaylake;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Queue;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

/** What is sent to a server that answers what a test says. */
class RepeatsTest {
    private static final String OUTCOME =
        "{\"outcomes\":[{\"subscription\":\"a\",\"ledgerId\":7,\"entryId\":0,\"batchIndex\":-1,\"result\":\"%s\",\"reason\":\"\"}]}";
    private static final Reply SCHEDULED = new Reply(201, "{\"messageId\":\"7:0:-1:-1\",\"deliverAt\":1896069600000}", "");
    private static final Reply HANG_UP = new Reply(0, "", "");

    private record Reply(int status, String body, String retryAfter) {}

    private record Seen(String method, String uri, String key, String token, String body) {}

    private final Queue<Reply> replies = new ArrayDeque<>();
    private final List<Seen> seen = new ArrayList<>();
    private HttpServer server;
    private Client lake;

    @BeforeEach
    void start() throws IOException {
        server = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 0);
        server.createContext("/", this::answer);
        server.start();
        lake = Client.of("http://127.0.0.1:" + server.getAddress().getPort() + "/").withToken("secret\n");
    }

    @AfterEach
    void stop() {
        server.stop(0);
    }

    private void answer(HttpExchange exchange) throws IOException {
        String body = new String(exchange.getRequestBody().readAllBytes(), StandardCharsets.UTF_8);
        var headers = exchange.getRequestHeaders();
        seen.add(new Seen(exchange.getRequestMethod(), exchange.getRequestURI().toString(),
            headers.getFirst("Idempotency-Key"), headers.getFirst("Authorization"), body));
        Reply reply = replies.remove();
        if (reply.status > 0) {
            if (!reply.retryAfter.isEmpty()) exchange.getResponseHeaders().add("Retry-After", reply.retryAfter);
            byte[] bytes = reply.body.getBytes(StandardCharsets.UTF_8);
            exchange.sendResponseHeaders(reply.status, bytes.length);
            exchange.getResponseBody().write(bytes);
        }
        exchange.close();
    }

    @Test
    void aCallIsRepeatedUnderTheSameKeyUntilItIsAnswered() {
        replies.addAll(List.of(HANG_UP, new Reply(503, "{\"reason\":\"no broker\"}", ""), new Reply(504, "", ""), SCHEDULED));
        NewMessage message = NewMessage.text("ship it").after(Duration.ofMinutes(10)).properties(Map.of("a", "ü"));
        MessageId id = lake.schedule("orders", message);
        assertEquals("7:0:-1:-1", id.toString());
        assertEquals(Instant.ofEpochMilli(1_896_069_600_000L), id.deliverAt());
        assertEquals(4, seen.size());
        assertEquals(1, seen.stream().distinct().count());
        Seen first = seen.get(0);
        assertEquals("Bearer secret", first.token);
        assertEquals("/admin/v2/persistent/public/default/orders/delayed", first.uri);
        Map<String, Object> sent = Json.object(first.body);
        assertEquals(Map.of("payloadBase64", "c2hpcCBpdA==", "deliverAfter", 600_000L, "properties", Map.of("a", "ü")), sent);
    }

    @Test
    void whatTheApiAsksToWaitIsWaited() {
        replies.addAll(List.of(new Reply(429, "{\"reason\":\"too often\"}", "1"), SCHEDULED));
        long began = System.nanoTime();
        lake.schedule("orders", NewMessage.text("x").at(Instant.EPOCH));
        assertTrue(System.nanoTime() - began >= 1_000_000_000L);
    }

    @Test
    void afterTheTimeIsOverTheErrorSaysWhetherTheCallMayHaveBeenDone() throws IOException {
        int port;
        try (ServerSocket closed = new ServerSocket(0)) {
            port = closed.getLocalPort();
        }
        Client nobody = Client.of("http://127.0.0.1:" + port).withTimeout(Duration.ofMillis(300));
        var unavailable = assertThrows(
            DelayLakeException.Unavailable.class, () -> nobody.postpone("orders", Named.id("7:0"), Duration.ZERO, Target.ALL));
        assertFalse(unavailable instanceof DelayLakeException.NoAnswer);
        for (int i = 0; i < 20; i++) replies.add(HANG_UP);
        Instant at = Instant.ofEpochMilli(5);
        var unanswered = assertThrows(DelayLakeException.NoAnswer.class, () -> lake.withTimeout(Duration.ofMillis(300))
            .reschedule("orders", Named.id("7:0"), at, Target.subscription("a").requestId("mine")));
        assertEquals("mine", unanswered.requestId());
        assertEquals(at, unanswered.deliverAt());
    }

    @Test
    void anAnswerOfAProxyDoesNotSayThatNothingWasDone() {
        Map.of(502, true, 504, true, 503, false, 429, false).forEach((status, mayBeDone) -> {
            replies.add(new Reply(status, "{}", "60")); // longer than a call lasts
            var error = assertThrows(
                DelayLakeException.Unavailable.class, () -> lake.deliverNow("orders", Named.id("7:0"), Target.ALL));
            assertEquals(mayBeDone, error instanceof DelayLakeException.NoAnswer, "" + status);
        });
    }

    @Test
    void aMessageThatIsScheduledAgainIsAnotherUnlessItHasARequestId() {
        for (int i = 0; i < 4; i++) replies.add(SCHEDULED);
        NewMessage message = NewMessage.text("x").at(Instant.EPOCH);
        for (int i = 0; i < 2; i++) lake.schedule("orders", message);
        message.requestId("mine");
        for (int i = 0; i < 2; i++) lake.schedule("orders", message);
        assertNotEquals(seen.get(0).key, seen.get(1).key);
        assertEquals(List.of("mine", "mine"), List.of(seen.get(2).key, seen.get(3).key));
    }

    @Test
    void timesAreRoundedUpSoThatNothingIsEarly() {
        replies.addAll(List.of(SCHEDULED, new Reply(200, OUTCOME.formatted("APPLIED"), "")));
        Instant time = Instant.ofEpochSecond(7, 1);
        lake.schedule("orders", NewMessage.text("").at(time).expireAt(Instant.ofEpochSecond(8)));
        lake.reschedule("orders", Named.id("7:0"), time, Target.ALL);
        Map<String, Object> sent = Json.object(seen.get(0).body);
        assertEquals(List.of(7_001L, 8_000L), List.of(sent.get("deliverAt"), sent.get("expireAt")));
        assertEquals(7_001L, Json.object(seen.get(1).body).get("deliverAt"));
    }

    @Test
    void anInterruptEndsACallAndIsKept() {
        replies.add(HANG_UP);
        Thread.currentThread().interrupt();
        assertThrows(DelayLakeException.NoAnswer.class, () -> lake.deliverNow("orders", Named.id("7:0"), Target.ALL));
        assertTrue(Thread.interrupted());
        assertThrows(InterruptedException.class, () -> RetryingConsumer.handle(null, null, null, "a", message -> {
            throw new InterruptedException();
        }));
        assertTrue(Thread.interrupted());
    }

    @Test
    void aRefusalIsNotRepeatedAndHasItsClass() {
        Map<Integer, Class<?>> kinds = Map.of(404, DelayLakeException.NotFound.class, 403, DelayLakeException.Forbidden.class,
            422, DelayLakeException.Invalid.class, 405, DelayLakeException.NotAllowed.class, 410, DelayLakeException.Gone.class);
        kinds.forEach((status, kind) -> {
            seen.clear();
            replies.add(new Reply(status, "{\"reason\":\"because\"}", ""));
            var error = assertThrows(
                DelayLakeException.class, () -> lake.schedule("orders", NewMessage.text("x").after(Duration.ZERO)));
            assertSame(kind, error.getClass());
            assertEquals("because", error.getMessage());
            assertEquals(1, seen.size());
        });
    }

    @Test
    void anOutcomeThatIsNotDoneIsAnErrorAndACancelMayWait() {
        replies.add(new Reply(412, OUTCOME.formatted("TOO_LATE"), ""));
        MessageId id = Named.id("7:0").at(Instant.ofEpochMilli(1));
        var late = assertThrows(DelayLakeException.TooLate.class, () -> lake.cancel("orders", id));
        assertEquals("TOO_LATE", late.outcomes().get(0).result());
        replies.add(new Reply(200, OUTCOME.formatted("WAITING"), ""));
        assertTrue(lake.cancel("orders", id).get(0).isDone());
    }

    @Test
    void anotherServersAnswersAreNamed() {
        for (Reply other : List.of(new Reply(200, "{\"hello\":1}", ""), new Reply(404, "nothing", ""), new Reply(500, "[", ""))) {
            replies.add(other);
            var error = assertThrows(
                DelayLakeException.class, () -> lake.restore("orders", Named.id("7:0"), Target.ALL));
            assertSame(DelayLakeException.class, error.getClass());
            assertTrue(error.getMessage().contains("is it delaylake's admin API"), error.getMessage());
        }
    }

    @Test
    void aCommandNamesTopicPartitionSubscriptionAndMessage() {
        for (int i = 0; i < 5; i++) replies.add(new Reply(200, OUTCOME.formatted("APPLIED"), ""));
        Target target = Target.subscription("x/y");
        lake.skip("persistent://a/b/c d", Named.id("7:0:2:5"), target);
        lake.cancel("orders", Named.key("order-7"));
        lake.retry("orders", Named.id("7:0:-1:3"), "no \"way\"", Duration.ofSeconds(10), Target.subscription("billing"));
        lake.endSchedule("orders", Named.id("7:0"), target);
        assertEquals("/admin/v2/persistent/a/b/c%20d-partition-2/subscription/x%2Fy/skipByMessageIds", seen.get(0).uri);
        assertEquals("[\"7:0:5\"]", seen.get(0).body);
        assertEquals("{\"scheduleKey\":\"order-7\",\"subscriptionNames\":[\"*\"]}", seen.get(1).body);
        var asked = Map.of("messageIds", List.of("7:0:3"), "reason", "no \"way\"", "afterMillis", 10_000L);
        assertEquals(asked, Json.object(seen.get(2).body));
        assertEquals("DELETE /admin/v2/persistent/public/default/orders/schedules/7%3A0?subscriptionNames=x%2Fy",
            seen.get(3).method + " " + seen.get(3).uri);
        lake.retry("orders", Named.id("7:0"), null, null, target);
        assertEquals("", Json.object(seen.get(4).body).get("reason"));
    }

    @Test
    void aListingGoesOnFromPageToPageUpToItsLimit() {
        String one = "{\"messageId\":\"7:0:-1:-1\",\"deliverAt\":null,\"subscriptions\":[\"a\"],\"key\":null,\"orderingKey\":null,"
            + "\"properties\":{},\"eventTime\":0,\"publishTime\":1,\"expiresAt\":7}";
        replies.add(new Reply(200, "{\"messages\":[" + one + "," + one + "],\"nextCursor\":\"a b\"}", ""));
        replies.add(new Reply(200, "{\"messages\":[" + one + "],\"nextCursor\":\"more\"}", ""));
        List<PendingMessage> found = new ArrayList<>();
        lake.pending("orders", PendingFilter.all().property("a", "b=c").limit(3)).forEach(found::add);
        assertEquals(3, found.size());
        assertNull(found.get(0).deliverAt());
        assertNull(found.get(0).eventTime());
        assertEquals(Instant.ofEpochMilli(7), found.get(0).expiresAt());
        assertEquals("/admin/v2/persistent/public/default/orders/delayed?property=a%3Db%3Dc&limit=1&cursor=a%20b", seen.get(1).uri);
    }

    @Test
    void aWrongArgumentIsToldBeforeAnythingIsSent() {
        List<Runnable> wrong = List.of(
            () -> lake.schedule("orders", NewMessage.text("x")),
            () -> lake.schedule("non-persistent://a/b/c", NewMessage.text("x").after(Duration.ZERO)),
            () -> NewMessage.text("x").after(Duration.ofMillis(-1)),
            () -> lake.cancel("orders", Named.id("7:0")),
            () -> Named.id("nonsense"),
            () -> Client.of("localhost:8081"));
        for (Runnable one : wrong) {
            assertInstanceOf(IllegalArgumentException.class, assertThrows(RuntimeException.class, one::run));
        }
        assertEquals(List.of(), seen);
    }

    @Test
    void aRedriveIsRepeatedUnderTheSameKeyAndTellsItsNumbers() {
        replies.addAll(List.of(HANG_UP, new Reply(200, "{\"matched\":3,\"redriven\":2,\"refused\":1}", "")));
        DeadLetterFilter filter = DeadLetterFilter.subscription("a")
            .messages(List.of(MessageId.parse("7:0:-1:-1"), MessageId.parse("7:1:2:3"))).limit(9);
        assertEquals(new Redriven(3, 2, 0, 1, 0), lake.redrive("orders", filter));
        Map<String, Object> body = Json.object(seen.get(1).body);
        assertEquals(Map.of("subscription", "a", "messageIds", List.of("7:0:-1", "7:1:3")), body.get("filter"));
        assertEquals(List.of(false, 9L), List.of(body.get("dryRun"), body.get("max")));
        assertEquals(seen.get(0).key, seen.get(1).key);
    }

    @Test
    void theStateOfAnEntryWithSeveralMessagesIsAskedForByABatchIndex() {
        String one = "{\"messageId\":\"7:0:-1:%s\",\"deliverAt\":5,\"subscriptions\":[\"a\",\"b\"]}";
        String two = String.format(one, 0) + "," + String.format(one, 1);
        for (String page : List.of(two, String.format(one, 0), two, "")) {
            replies.add(new Reply(200, "{\"messages\":[" + page + "],\"nextCursor\":null}", ""));
        }
        MessageState state = lake.get("orders", MessageId.parse("7:0:0"));
        assertEquals("7:0:-1:0", state.message().id().toString());
        assertEquals(List.of(List.of("a", "b"), List.of("a", "b")), List.of(state.waitingFor(), state.cancelledFor()));
        assertThrows(DelayLakeException.Invalid.class, () -> lake.get("orders", MessageId.parse("7:0")));
    }

    @Test
    void aScheduleIsNamedByItsKeyInTheQueryAndAPauseHasNoBody() {
        replies.addAll(List.of(new Reply(200, OUTCOME.formatted("APPLIED"), ""), new Reply(200, OUTCOME.formatted("APPLIED"), "")));
        lake.pauseSchedule("orders", Named.key("k 1"), Target.subscription("a"));
        lake.resume("orders", Target.subscription("a/b"));
        String path = "/admin/v2/persistent/public/default/orders";
        assertEquals(path + "/schedules/pause?scheduleKey=k%201&subscriptionNames=a", seen.get(0).uri);
        assertEquals(path + "/subscription/a%2Fb/resume", seen.get(1).uri);
        assertThrows(IllegalArgumentException.class, () -> lake.pause("orders", Target.ALL));
    }
}
