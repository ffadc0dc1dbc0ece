package delaylake;

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.Instant;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.Map;

/**
 * A message to be delivered later.
 *
 * <pre>NewMessage.text("ship it").after(Duration.ofMinutes(10)).key("customer-7")</pre>
 */
public final class NewMessage {
    final Map<String, Object> body = new LinkedHashMap<>();
    String requestId; // null: each call has one of its own

    private NewMessage(byte[] payload) {
        body.put("payloadBase64", Base64.getEncoder().encodeToString(payload));
    }

    /** A text, sent as UTF-8; JSON that you have made is one. */
    public static NewMessage text(String payload) {
        return new NewMessage(payload.getBytes(StandardCharsets.UTF_8));
    }

    /** Bytes, sent as they are. */
    public static NewMessage bytes(byte[] payload) {
        return new NewMessage(payload);
    }

    /** When; a past time means at once. For a message that recurs the time of the first occurrence. */
    public NewMessage at(Instant time) {
        return with("deliverAt", Json.millis(time));
    }

    /** The delay, instead of {@link #at}. */
    public NewMessage after(Duration delay) {
        return with("deliverAfter", positive(delay));
    }

    /** Pulsar's partition key. */
    public NewMessage key(String key) {
        return with("key", key);
    }

    public NewMessage orderingKey(String key) {
        return with("orderingKey", key);
    }

    public NewMessage properties(Map<String, String> properties) {
        return with("properties", Map.copyOf(properties));
    }

    public NewMessage eventTime(Instant time) {
        return with("eventTime", Json.millis(time));
    }

    /** Type of the topic's newest schema, which the message then has, as JSON; the payload is sent as it is given. */
    public NewMessage schema(String type) {
        return with("schema", type);
    }

    /** Of all messages of a topic with the same schedule key only one waits. */
    public NewMessage scheduleKey(String key) {
        return with("scheduleKey", key);
    }

    /** What happens where another waits under the key: {@code replace}, {@code keep} or {@code debounce}. */
    public NewMessage scheduleMode(String mode) {
        return with("scheduleMode", mode);
    }

    /** How long the key's message may be put off. */
    public NewMessage debounceMax(Duration longest) {
        return with("debounceMax", positive(longest));
    }

    /** What can't be sent by then is not sent. */
    public NewMessage expireAt(Instant time) {
        return with("expireAt", Json.millis(time));
    }

    /** How long after it is due; with both the earlier end counts. */
    public NewMessage expireAfter(Duration longest) {
        return with("expireAfter", positive(longest));
    }

    /** The rule of a message that recurs: cron, {@code @every 90s} or an RRULE. */
    public NewMessage repeat(String rule) {
        return with("repeat", rule);
    }

    /** IANA name of the rule's zone; without it UTC. */
    public NewMessage timeZone(String zone) {
        return with("timeZone", zone);
    }

    public NewMessage repeatUntil(Instant time) {
        return with("repeatUntil", Json.millis(time));
    }

    public NewMessage repeatTimes(long times) {
        return with("repeatTimes", times);
    }

    /** What happens to missed occurrences: {@code once}, {@code all} or {@code skip}. */
    public NewMessage misfire(String misfire) {
        return with("misfire", misfire);
    }

    /** Of a topic's messages with the same id the first is delivered. Without it each call to schedule has one of its own. */
    public NewMessage requestId(String id) {
        requestId = id;
        return this;
    }

    private NewMessage with(String name, Object value) {
        body.put(name, value);
        return this;
    }

    private static long positive(Duration duration) {
        if (duration.isNegative()) throw new IllegalArgumentException("negative: " + duration);
        return duration.toMillis();
    }
}
