package delaylake;

/**
 * What a command did to a message of one subscription.
 *
 * @param subscription its name; {@code *}: subscriptions that are added to the topic later
 * @param result {@code APPLIED}, {@code ALREADY_APPLIED}, {@code WAITING} (for a cancel that came before its message), or an error
 * @param reason of an error, one line
 * @param isDone whether the command is done, now or before
 */
public record Outcome(String subscription, MessageId message, String result, String reason, boolean isDone) {}
