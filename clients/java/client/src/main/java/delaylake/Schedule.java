package delaylake;

import java.time.Instant;
import java.util.List;

/**
 * A message that recurs, as far as the tables know: a few seconds behind.
 *
 * @param state the first of {@code waiting}, {@code held}, {@code paused}, {@code cancelled} and {@code ended} that any subscription is in
 * @param nextOccurrence the number of the soonest occurrence that waits; null: none waits
 * @param nextDeliverAt when that is due; null: none waits, or it is parked or paused
 */
public record Schedule(
    MessageId id, String repeat, String timeZone, Instant firstDeliverAt, String state, Integer nextOccurrence,
    Instant nextDeliverAt, String key, String scheduleKey, Instant publishTime, List<Progress> subscriptions) {

    /** How far a schedule has got for a subscription. */
    public record Progress(
        String subscription, String state, long delivered, Integer lastOccurrence, Integer nextOccurrence,
        Instant nextDeliverAt) {}
}
