const ID = /^(\d{1,19}):(\d{1,19})(?::(-?\d{1,10}))?(?::(-?\d{1,10}))?$/;

/** The id of a message of a source topic. Its text is `ledger:entry:partition:batchIndex`. */
export class MessageId {
  /**
   * @param ledgerId decimal, since it may have more digits than a number is exact for
   * @param entryId decimal, as `ledgerId`
   * @param partition -1: the topic has no partitions
   * @param batchIndex -1: the entry is one message, or all of its messages are meant
   * @param deliverAt when the message is due, if known
   */
  constructor(
    readonly ledgerId: string,
    readonly entryId: string,
    readonly partition = -1,
    readonly batchIndex = -1,
    readonly deliverAt?: Date,
  ) {}

  /** Reads `ledger:entry`, `ledger:entry:batchIndex` or `ledger:entry:partition:batchIndex`. */
  static parse(text: string, deliverAt?: Date): MessageId {
    const found = ID.exec(text);
    if (!found) throw new RangeError(`no message id: ${JSON.stringify(text.slice(0, 80))} (ledger:entry[:batchIndex])`);
    const [, ledger, entry, third, fourth] = found;
    const [partition, batchIndex] = fourth === undefined ? [-1, Number(third ?? -1)] : [Number(third), Number(fourth)];
    return new MessageId(ledger!, entry!, Math.max(partition, -1), Math.max(batchIndex, -1), deliverAt);
  }

  static of(message: MessageId | string, deliverAt?: Date): MessageId {
    if (message instanceof MessageId && deliverAt === undefined) return message;
    return MessageId.parse(String(message), deliverAt);
  }

  toString(): string {
    return `${this.ledgerId}:${this.entryId}:${this.partition}:${this.batchIndex}`;
  }

  toJSON(): string {
    return this.toString();
  }
}

/** What a command did to a message of one subscription. */
export interface Outcome {
  /** Its name; `*`: subscriptions that are added to the topic later. */
  readonly subscription: string;
  readonly message: string;
  /** `APPLIED`, `ALREADY_APPLIED`, `WAITING` (for a cancel that came before its message), or an error. */
  readonly result: string;
  readonly reason: string;
  readonly isDone: boolean;
}

/** A message that is not delivered yet, as far as the tables know: a few seconds behind. */
export interface PendingMessage {
  readonly id: MessageId;
  /** When it is due; null: it is parked, or its schedule is paused. */
  readonly deliverAt: Date | null;
  readonly subscriptions: readonly string[];
  readonly key: string | null;
  readonly orderingKey: string | null;
  readonly properties: Readonly<Record<string, string>>;
  readonly eventTime: Date | null;
  readonly publishTime: Date;
  readonly producerName: string | null;
  /** From when on it is not sent any more to the first of these subscriptions; null: it has no end. */
  readonly expiresAt: Date | null;
}

/** A message that is not delivered to all of its subscriptions yet. */
export interface MessageState {
  readonly message: PendingMessage;
  /** Subscriptions to which it will go. */
  readonly waitingFor: readonly string[];
  /** Subscriptions for which it was cancelled or skipped, and can be restored. */
  readonly cancelledFor: readonly string[];
}

/** The numbers of dead letters in a re-drive. */
export interface Redriven {
  /** All that matched; the following are parts of them, but the last. */
  readonly matched: number;
  /** Will be delivered once more. */
  readonly redriven: number;
  /** Sent back by an earlier call with the same request id, which was broken off. */
  readonly alreadyRedriven: number;
  /** The topic does not take their size or schema, or has no such partition. */
  readonly refused: number;
  /** Entries of the topic of dead letters that can't be read, and stay there. */
  readonly unreadable: number;
}

/** How far a schedule has got for a subscription. */
export interface ScheduleProgress {
  readonly subscription: string;
  /** `waiting`, `held` (parked by a pause), `cancelled` or `ended`. */
  readonly state: string;
  readonly delivered: number;
  readonly lastOccurrence: number | null;
  readonly nextOccurrence: number | null;
  readonly nextDeliverAt: Date | null;
}

/** A message that recurs, as far as the tables know: a few seconds behind. */
export interface Schedule {
  readonly id: MessageId;
  readonly repeat: string;
  readonly timeZone: string;
  readonly repeatUntil: Date | null;
  readonly repeatTimes: number | null;
  readonly misfire: string;
  readonly firstDeliverAt: Date;
  /** The first of `waiting`, `held`, `paused`, `cancelled` and `ended` that any subscription is in. */
  readonly state: string;
  readonly nextOccurrence: number | null;
  readonly nextDeliverAt: Date | null;
  readonly key: string | null;
  readonly scheduleKey: string | null;
  readonly publishTime: Date;
  readonly producerName: string | null;
  readonly subscriptions: readonly ScheduleProgress[];
}
