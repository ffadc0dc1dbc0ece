package delaylake;

import java.time.Instant;
import java.util.List;
import java.util.Map;

/**
 * A message that is not delivered yet, as far as the tables know: a few seconds behind.
 *
 * @param deliverAt when it is due; null: it is parked, or its schedule is paused
 * @param subscriptions those for which it is in the listed state
 * @param key null: it has none; so are orderingKey and eventTime
 * @param expiresAt from when on it is not sent any more to the first of these subscriptions; null: it has no end
 */
public record PendingMessage(
    MessageId id, Instant deliverAt, List<String> subscriptions, String key, String orderingKey,
    Map<String, String> properties, Instant eventTime, Instant publishTime, Instant expiresAt) {}
