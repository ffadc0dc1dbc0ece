package delaylake;

import java.io.IOException;
import java.net.URI;
import java.net.URLEncoder;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Function;
import java.util.function.Supplier;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;

/**
 * Schedules messages, and changes and lists those that wait, over the admin API. Thread-safe.
 *
 * <pre>
 * Client lake = Client.of("http://127.0.0.1:8081");
 * MessageId message = lake.schedule("orders", NewMessage.text("ship it").after(Duration.ofMinutes(10)));
 * lake.cancel("orders", message);
 * </pre>
 *
 * A command returns an outcome for each subscription. If it fails for some, it throws the error of the gravest outcome;
 * for the others it is done. A call whose connection fails is repeated until its time is over. To repeat it after that, or
 * in another process, give it the request id that you chose, or that of the error.
 */
public final class Client {
    private static final Duration CONNECT = Duration.ofSeconds(5);
    private static final int PAGE = 1_000; // messages or schedules in a page: the API's maximum
    private static final Set<String> DONE = Set.of("APPLIED", "ALREADY_APPLIED");
    private static final Set<Integer> PROXY_STATUSES = Set.of(401, 403, 413, 429, 502, 503, 504); // also without a reason
    private static final String WHOSE = "is it delaylake's admin API?";

    private final String url;
    private final Supplier<String> token; // null: there is none
    private final Duration timeout;
    private final HttpClient http;

    private Client(String url, Supplier<String> token, Duration timeout, HttpClient http) {
        this.url = url;
        this.token = token;
        this.timeout = timeout;
        this.http = http;
    }

    /** A client of the admin API at a URL, as http://127.0.0.1:8081. */
    public static Client of(String url) {
        if (!url.matches("https?://.+")) throw new IllegalArgumentException("none of an admin API: " + url);
        HttpClient http = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).connectTimeout(CONNECT).build();
        return new Client(url.replaceAll("/+$", ""), null, Duration.ofSeconds(30), http);
    }

    /** The same with a Pulsar token, for which a function is called each time. */
    public Client withToken(Supplier<String> token) {
        return new Client(url, token, timeout, http);
    }

    /** The same with a Pulsar token. */
    public Client withToken(String token) {
        return withToken(() -> token);
    }

    /** The same with another time for a call with all its repetitions; 30 s without it. */
    public Client withTimeout(Duration timeout) {
        if (timeout.isNegative() || timeout.isZero()) throw new IllegalArgumentException("timeout must be above 0");
        return new Client(url, token, timeout, http);
    }

    /** The same over an HttpClient of your own, with proxies or certificates. */
    public Client withHttp(HttpClient http) {
        return new Client(url, token, timeout, http);
    }

    /** Sends a message that is delivered later; returns its id, which knows the time. */
    public MessageId schedule(String topic, NewMessage message) {
        Map<String, Object> given = message.body;
        if (given.containsKey("deliverAt") && given.containsKey("deliverAfter")
            || !given.containsKey("deliverAt") && !given.containsKey("deliverAfter") && !given.containsKey("repeat")) {
            throw new IllegalArgumentException("one of at and after is needed");
        }
        String requestId = message.requestId == null ? UUID.randomUUID().toString() : message.requestId;
        Map<String, String> headers = Map.of("Idempotency-Key", requestId);
        Call call = new Call("POST", path(topic, null) + "/delayed", List.of(), given, headers, requestId);
        Map<String, Object> made = content(call, send(call), "messageId");
        return MessageId.parse((String) made.get("messageId")).at(Json.time(made.get("deliverAt")));
    }

    /** As {@link #cancel(String, Named, Target)}, for all subscriptions. */
    public List<Outcome> cancel(String topic, Named message) {
        return cancel(topic, message, Target.ALL);
    }

    /**
     * Cancels a message, on subscriptions of any type. By its id it may come before its message, and needs the time in the
     * id, as {@link #schedule} returns it.
     */
    public List<Outcome> cancel(String topic, Named message, Target target) {
        Map<String, Object> body = new LinkedHashMap<>();
        if (message instanceof MessageId id) {
            if (id.batchIndex() >= 0) throw new IllegalArgumentException("a cancel is of all messages of a batch: skip " + id);
            if (id.deliverAt() == null) throw new IllegalArgumentException("a cancel needs the message's time: or skip");
            body.putAll(Map.of("ledgerId", id.ledgerId(), "entryId", id.entryId(), "deliverAt", Json.millis(id.deliverAt())));
        } else if (message instanceof ScheduleKey key) {
            body.put("scheduleKey", key.key());
        }
        body.put("subscriptionNames", List.of(target.subscription()));
        return outcomes("POST", path(topic, message) + "/cancelDelayedMessage", message, target, body, null);
    }

    /** Cancels a message, also a single one of a batch, without its time; not on Exclusive and Failover subscriptions. */
    public List<Outcome> skip(String topic, Named message, Target target) {
        Object body = named(message, Map.of());
        return outcomes("POST", path(topic, message, target, "skipByMessageIds"), message, target, body, null);
    }

    /** Moves a message that waits to an earlier or later time. */
    public List<Outcome> reschedule(String topic, Named message, Instant at, Target target) {
        Object body = named(message, Map.of("deliverAt", Json.millis(at)));
        return outcomes("POST", path(topic, message, target, "reschedule"), message, target, body, at);
    }

    /** Moves a message that waits so much later than it would be delivered; negative: sooner, but not before now. */
    public List<Outcome> postpone(String topic, Named message, Duration by, Target target) {
        Object body = named(message, Map.of("byMillis", by.toMillis()));
        return outcomes("POST", path(topic, message, target, "postpone"), message, target, body, null);
    }

    /** Delivers a message that waits at once. */
    public List<Outcome> deliverNow(String topic, Named message, Target target) {
        return outcomes("POST", path(topic, message, target, "deliverNow"), message, target, named(message, Map.of()), null);
    }

    /** Undoes a cancel or skip of a message whose time has not come. */
    public List<Outcome> restore(String topic, MessageId message, Target target) {
        return outcomes("POST", path(topic, message, target, "restore"), message, target, named(message, Map.of()), null);
    }

    /**
     * Delivers a message once more to a subscription whose consumer failed on it.
     *
     * @param topic the delivered message's property {@code delaylake.source}
     * @param message the delivered message's property {@code delaylake.messageId}
     * @param reason one line; null: none
     * @param after the delay; null: as the subscription's backoff says
     * @param target one subscription; with a request id for each message and attempt, a consumer that asks twice gets one
     *     retry
     */
    public List<Outcome> retry(String topic, MessageId message, String reason, Duration after, Target target) {
        Map<String, Object> fields = Map.of(
            "reason", reason == null ? "" : reason, "afterMillis", after == null ? 0L : after.toMillis());
        return outcomes("POST", path(topic, message, target, "retry"), message, target, named(message, fields), null);
    }

    /** Parks what comes due for a subscription, until it is resumed, or rescheduled. */
    public List<Outcome> pause(String topic, Target target) {
        return ofSubscription(topic, "pause", target);
    }

    /** Ends the pause of a subscription: what came due meanwhile is delivered now. */
    public List<Outcome> resume(String topic, Target target) {
        return ofSubscription(topic, "resume", target);
    }

    /** Skips the next occurrence of a message that recurs. */
    public List<Outcome> skipNext(String topic, Named message, Target target) {
        return ofSchedule("POST", topic, "/skipNext", message, target);
    }

    /** Pauses a schedule: the next occurrence waits until the schedule is resumed. */
    public List<Outcome> pauseSchedule(String topic, Named message, Target target) {
        return ofSchedule("POST", topic, "/pause", message, target);
    }

    /** Resumes a paused schedule. For occurrences that were missed meanwhile see its {@code misfire}. */
    public List<Outcome> resumeSchedule(String topic, Named message, Target target) {
        return ofSchedule("POST", topic, "/resume", message, target);
    }

    /** Ends a schedule: no further occurrence of the message that recurs is delivered. */
    public List<Outcome> endSchedule(String topic, MessageId message, Target target) {
        return ofSchedule("DELETE", topic, "", message, target);
    }

    /** Delivers the matching dead letters of a subscription once more, or counts them. */
    public Redriven redrive(String topic, DeadLetterFilter filter) {
        String requestId = filter.requestId == null ? UUID.randomUUID().toString() : filter.requestId;
        Map<String, Object> body = Map.of("filter", filter.body, "dryRun", filter.isDryRun, "max", filter.limit);
        Map<String, String> headers = Map.of("Idempotency-Key", requestId);
        Call call = new Call("POST", path(topic, null) + "/dlq/redrive", List.of(), body, headers, requestId);
        Map<String, Object> found = content(call, send(call), "matched");
        return new Redriven(
            count(found, "matched"), count(found, "redriven"), count(found, "alreadyRedriven"), count(found, "refused"),
            count(found, "unreadable"));
    }

    /**
     * Returns for which subscriptions a message waits, and for which it was cancelled; a few seconds behind.
     *
     * @throws DelayLakeException.NotFound the message is delivered, came within the last seconds, or never existed
     * @throws DelayLakeException.Invalid the entry has several messages, and the id names none of them
     */
    public MessageState get(String topic, MessageId message) {
        List<PendingMessage> waiting = ofEntry(topic, message, "waiting");
        List<PendingMessage> cancelled = ofEntry(topic, message, "takenBack");
        List<PendingMessage> all = Stream.concat(waiting.stream(), cancelled.stream()).toList();
        DelayLakeException.Details details = DelayLakeException.Details.of("", null);
        if (all.isEmpty()) throw new DelayLakeException.NotFound(message + " does not wait, or has only just come", details);
        if (all.stream().map(PendingMessage::id).distinct().count() > 1) {
            throw new DelayLakeException.Invalid(message + " is a batch of several messages: name one by its batch index", details);
        }
        return new MessageState(all.get(0), subscriptions(waiting), subscriptions(cancelled));
    }

    /** Goes through what waits, soonest first, a few seconds behind. */
    public Iterable<PendingMessage> pending(String topic, PendingFilter filter) {
        return pending(topic, filter.query, filter.limit);
    }

    /** Goes through the messages that recur, in the order in which they came. */
    public Iterable<Schedule> schedules(String topic) {
        return listed(path(topic, null) + "/schedules", List.of(), "schedules", Long.MAX_VALUE, one -> new Schedule(
            MessageId.parse((String) one.get("id")).at(Json.time(one.get("nextDeliverAt"))),
            (String) one.get("repeat"), (String) one.get("timeZone"), Json.time(one.get("firstDeliverAt")),
            state(one.get("state")), Json.number(one.get("nextOccurrence")), Json.time(one.get("nextDeliverAt")),
            (String) one.get("key"), (String) one.get("scheduleKey"), Json.time(one.get("publishTime")),
            Json.objects(one.get("subscriptions")).stream().map(part -> new Schedule.Progress(
                (String) part.get("subscription"), state(part.get("state")), (Long) part.get("delivered"),
                Json.number(part.get("lastOccurrence")), Json.number(part.get("nextOccurrence")),
                Json.time(part.get("nextDeliverAt")))).toList()));
    }

    private record Call(
        String method, String path, List<Map.Entry<String, String>> query, Object body, Map<String, String> headers,
        String requestId) {}

    private record Answer(int status, Map<String, Object> content, String reason, long retryAfterMillis) {}

    private Iterable<PendingMessage> pending(String topic, List<Map.Entry<String, String>> query, long limit) {
        return listed(path(topic, null) + "/delayed", query, "messages", limit, one -> new PendingMessage(
            MessageId.parse((String) one.get("messageId")).at(Json.time(one.get("deliverAt"))),
            Json.time(one.get("deliverAt")), Json.texts(one.get("subscriptions")), (String) one.get("key"),
            (String) one.get("orderingKey"), Json.properties(one.get("properties")),
            Long.valueOf(0).equals(one.get("eventTime")) ? null : Json.time(one.get("eventTime")), Json.time(one.get("publishTime")),
            Json.time(one.get("expiresAt"))));
    }

    /** Returns the messages of an entry, or the one that an id names in it, that are in a state. */
    private List<PendingMessage> ofEntry(String topic, MessageId id, String state) {
        List<Map.Entry<String, String>> query = List.of(
            Map.entry("ledgerId", "" + id.ledgerId()), Map.entry("entryId", "" + id.entryId()),
            Map.entry("dueFrom", "0"), Map.entry("state", state));
        return StreamSupport.stream(pending(topic, query, Long.MAX_VALUE).spliterator(), false)
            .filter(one -> id.batchIndex() < 0 || id.batchIndex() == one.id().batchIndex()).toList();
    }

    /** A message is listed once for each time at which it is due. */
    private static List<String> subscriptions(List<PendingMessage> messages) {
        return messages.stream().flatMap(one -> one.subscriptions().stream()).distinct().toList();
    }

    private static long count(Map<String, Object> found, String name) {
        return (Long) found.getOrDefault(name, 0L);
    }

    /** Sends a command for all that a subscription gets. */
    private List<Outcome> ofSubscription(String topic, String operation, Target target) {
        if (target.subscription().equals("*")) throw new IllegalArgumentException("a " + operation + " names its subscription");
        return outcomes("POST", path(topic, null, target, operation), null, target, null, null);
    }

    /** Sends a command about a message that recurs; for all subscriptions it is for those that the topic has. */
    private List<Outcome> ofSchedule(String method, String topic, String last, Named message, Target target) {
        List<String> query = new ArrayList<>();
        if (message instanceof ScheduleKey key) query.add("scheduleKey=" + encoded(key.key()));
        if (!target.subscription().equals("*")) query.add("subscriptionNames=" + encoded(target.subscription()));
        String named = message instanceof MessageId id ? "/" + encoded(id.inTopic()) : "";
        String path = path(topic, message) + "/schedules" + named + last + (query.isEmpty() ? "" : "?" + String.join("&", query));
        return outcomes(method, path, message, target, null, null);
    }

    private List<Outcome> outcomes(
        String method, String path, Named message, Target target, Object body, Instant deliverAt) {
        String requestId = target.chosen().requestId();
        Map<String, String> headers = Map.of("Prefer", "return=representation", "Idempotency-Key", requestId);
        Call call = new Call(method, path, List.of(), body, headers, requestId);
        MessageId id = message instanceof MessageId given ? given : null;
        // A cancel by id that comes before its message waits for it, and that is enough.
        boolean waits = id != null && (method.equals("DELETE") || path.endsWith("/cancelDelayedMessage"));
        try {
            Answer answer = send(call);
            List<Outcome> outcomes = new ArrayList<>();
            for (Map<String, Object> one : Json.objects(answer.content.get("outcomes"))) {
                long ledgerId = (Long) one.get("ledgerId");
                int partition = id == null ? -1 : id.partition();
                MessageId found = ledgerId < 0 && id != null ? id
                    : new MessageId(ledgerId, (Long) one.get("entryId"), partition, Json.number(one.get("batchIndex")), null);
                String result = (String) one.get("result");
                boolean isDone = DONE.contains(result) || waits && result.equals("WAITING");
                outcomes.add(new Outcome((String) one.get("subscription"), found, result, (String) one.get("reason"), isDone));
            }
            if (!outcomes.stream().allMatch(Outcome::isDone)) {
                throw DelayLakeException.ofOutcomes(new DelayLakeException.Details(outcomes, requestId, deliverAt, null));
            }
            content(call, answer, "outcomes");
            return outcomes;
        } catch (DelayLakeException.NoAnswer error) {
            throw new DelayLakeException.NoAnswer(
                error.getMessage(), new DelayLakeException.Details(List.of(), requestId, deliverAt, error.getCause()));
        }
    }

    /** Returns a body that names a message. Ids alone are a list of texts: in an object they would be base64. */
    private static Object named(Named message, Map<String, Object> fields) {
        if (message instanceof MessageId id && fields.isEmpty()) return List.of(id.inTopic());
        Map<String, Object> body = new LinkedHashMap<>(fields);
        if (message instanceof MessageId id) body.put("messageIds", List.of(id.inTopic()));
        if (message instanceof ScheduleKey key) body.put("scheduleKeys", List.of(key.key()));
        return body;
    }

    private <T> Iterable<T> listed(
        String path, List<Map.Entry<String, String>> query, String name, long limit, Function<Map<String, Object>, T> made) {
        return () -> new Iterator<>() {
            private Iterator<Map<String, Object>> page = List.<Map<String, Object>>of().iterator();
            private String cursor = "";
            private long left = limit;

            @Override
            public boolean hasNext() {
                while (left > 0 && !page.hasNext() && cursor != null) {
                    List<Map.Entry<String, String>> asked = new ArrayList<>(query);
                    asked.add(Map.entry("limit", "" + Math.min(left, PAGE)));
                    if (!cursor.isEmpty()) asked.add(Map.entry("cursor", cursor));
                    Call call = new Call("GET", path, asked, null, Map.of(), "");
                    Map<String, Object> found = content(call, send(call), name);
                    page = Json.objects(found.get(name)).iterator();
                    cursor = (String) found.get("nextCursor");
                }
                return left > 0 && page.hasNext();
            }

            @Override
            public T next() {
                if (!hasNext()) throw new NoSuchElementException();
                left--;
                return made.apply(page.next());
            }
        };
    }

    /** Makes a call, and repeats it until it is answered or its time is over. */
    private Answer send(Call call) {
        Attempts attempts = new Attempts(call.requestId, timeout);
        try {
            while (true) {
                Throwable failure;
                long retryAfterMillis = 0;
                try {
                    Answer answer = attempt(call, attempts.nanosLeft());
                    DelayLakeException error = DelayLakeException.ofStatus(
                        answer.status, answer.reason, DelayLakeException.Details.of(call.requestId, null));
                    if (!(error instanceof DelayLakeException.Unavailable)) return answer;
                    failure = error;
                    retryAfterMillis = answer.retryAfterMillis;
                } catch (IOException error) {
                    failure = error;
                }
                attempts.pauseAfter(failure, retryAfterMillis);
            }
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            throw new DelayLakeException.NoAnswer("interrupted", DelayLakeException.Details.of(call.requestId, error));
        }
    }

    private Answer attempt(Call call, long nanosLeft) throws IOException, InterruptedException {
        StringBuilder address = new StringBuilder(url + call.path);
        char separator = '?';
        for (Map.Entry<String, String> one : call.query) {
            address.append(separator).append(one.getKey()).append('=').append(encoded(one.getValue()));
            separator = '&';
        }
        HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(address.toString()));
        call.headers.forEach(request::header);
        if (token != null) request.header("Authorization", "Bearer " + token.get().strip());
        if (call.body == null) {
            request.method(call.method, HttpRequest.BodyPublishers.noBody());
        } else {
            request.header("Content-Type", "application/json");
            request.method(call.method, HttpRequest.BodyPublishers.ofString(Json.text(call.body)));
        }
        // Its own time-out ends with the answer's headers.
        CompletableFuture<HttpResponse<String>> sent = http.sendAsync(request.build(), HttpResponse.BodyHandlers.ofString());
        try {
            HttpResponse<String> response = sent.get(nanosLeft, TimeUnit.NANOSECONDS);
            Map<String, Object> content = Json.object(response.body());
            String reason = content.get("reason") instanceof String said && !said.isEmpty() ? said : "" + response.statusCode();
            String asked = response.headers().firstValue("Retry-After").filter(text -> text.matches("\\d{1,9}")).orElse("0");
            return new Answer(response.statusCode(), content, reason, 1_000 * Long.parseLong(asked));
        } catch (ExecutionException error) {
            if (error.getCause() instanceof IOException failure) throw failure;
            throw new IOException(error.getCause());
        } catch (InterruptedException error) {
            sent.cancel(true);
            throw error;
        } catch (TimeoutException error) {
            sent.cancel(true);
            throw new IOException("no whole answer in time", error);
        }
    }

    /** Returns an answer's JSON, or throws the error that it is; {@code name}: a field that each such answer has. */
    private Map<String, Object> content(Call call, Answer answer, String name) {
        DelayLakeException.Details details = DelayLakeException.Details.of(call.requestId, null);
        String whose = url + call.path + " answers " + answer.status;
        if (answer.status >= 200 && answer.status < 300) {
            if (answer.content.containsKey(name)) return answer.content;
            throw new DelayLakeException(whose + " without '" + name + "': " + WHOSE, details);
        }
        if (answer.reason.startsWith("no such path")
            || !answer.content.containsKey("reason") && !PROXY_STATUSES.contains(answer.status)) {
            throw new DelayLakeException(whose + ", " + answer.reason + ": " + WHOSE, details);
        }
        throw DelayLakeException.ofStatus(answer.status, answer.reason, details);
    }

    private static String state(Object state) {
        return "takenBack".equals(state) ? "cancelled" : (String) state;
    }

    private static String path(String topic, Named message, Target target, String operation) {
        return path(topic, message) + "/subscription/" + encoded(target.subscription()) + "/" + operation;
    }

    /** Returns the path of a topic's calls, or of a message's partition: {@code orders} is in public/default. */
    private static String path(String topic, Named message) {
        String rest = topic.startsWith("persistent://") ? topic.substring("persistent://".length()) : topic;
        String[] parts = (rest.equals(topic) && !topic.contains("/") ? "public/default/" + topic : rest).split("/", 3);
        if (rest.contains("://") || parts.length != 3 || List.of(parts).contains("")) {
            throw new IllegalArgumentException("no persistent topic: " + topic);
        }
        int partition = message instanceof MessageId id ? id.partition() : -1;
        String suffix = partition < 0 ? "" : "-partition-" + partition;
        if (!parts[2].endsWith(suffix)) parts[2] += suffix;
        return "/admin/v2/persistent/" + encoded(parts[0]) + "/" + encoded(parts[1]) + "/" + encoded(parts[2]);
    }

    private static String encoded(String text) {
        return URLEncoder.encode(text, StandardCharsets.UTF_8).replace("+", "%20");
    }
}
