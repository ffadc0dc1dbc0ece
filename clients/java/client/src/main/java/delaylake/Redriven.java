package delaylake;

/**
 * The numbers of dead letters in a re-drive.
 *
 * @param matched all that matched; the following are parts of them, but the last
 * @param redriven will be delivered once more
 * @param alreadyRedriven sent back by an earlier call with the same request id, which was broken off
 * @param refused the topic does not take their size or schema, or has no such partition
 * @param unreadable entries of the topic of dead letters that can't be read, and stay there
 */
public record Redriven(long matched, long redriven, long alreadyRedriven, long refused, long unreadable) {}
