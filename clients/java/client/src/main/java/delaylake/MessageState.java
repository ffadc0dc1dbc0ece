package delaylake;

import java.util.List;

/**
 * A message that is not delivered to all of its subscriptions yet.
 *
 * @param waitingFor subscriptions to which it will go
 * @param cancelledFor subscriptions for which it was cancelled or skipped, and can be restored
 */
public record MessageState(PendingMessage message, List<String> waitingFor, List<String> cancelledFor) {}
