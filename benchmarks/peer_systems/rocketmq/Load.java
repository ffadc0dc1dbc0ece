import java.io.PrintWriter;
import java.util.Random;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Sends timed messages to a topic, and writes when each came, and how late, in ms, a line each.
 *
 * <p>Arguments: name server, topic, messages, messages a second (0: no limit), when they are due (ms since the epoch; 0:
 * 5 to 10 s ahead), the ms by which they are spread from then on, until when to wait for them (ms since the epoch; 0:
 * nobody reads them), the file to write.
 */
public class Load {
    public static void main(String[] args) {
        try {
            run(args);
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1); // the client's threads would go on
        }
        System.exit(0);
    }

    static void run(String[] args) throws Exception {
        String nameServer = args[0], topic = args[1];
        int n = Integer.parseInt(args[2]), rate = Integer.parseInt(args[3]);
        long due = Long.parseLong(args[4]), spread = Long.parseLong(args[5]), until = Long.parseLong(args[6]);
        DefaultMQProducer producer = new DefaultMQProducer("sends-" + topic);
        producer.setNamesrvAddr(nameServer);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        producer.send(new Message(topic, "0".getBytes())); // makes the topic
        Thread.sleep(2_000);
        ConcurrentLinkedQueue<long[]> arrivals = new ConcurrentLinkedQueue<>();
        AtomicLong came = new AtomicLong();
        if (until > 0) {
            receive(nameServer, topic, arrivals, came);
        }
        long sent = n - send(producer, topic, n, rate, due, spread);
        while (came.get() < sent && System.currentTimeMillis() < until) {
            Thread.sleep(200);
        }
        try (PrintWriter out = new PrintWriter(args[7])) {
            arrivals.forEach(arrival -> out.println(arrival[0] + " " + arrival[1]));
        }
    }

    static void receive(String nameServer, String topic, ConcurrentLinkedQueue<long[]> arrivals, AtomicLong came)
            throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("reads-" + topic);
        consumer.setNamesrvAddr(nameServer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(32);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = System.currentTimeMillis();
            for (MessageExt message : messages) {
                long due = Long.parseLong(new String(message.getBody()).split(" ", 2)[0]);
                if (due > 0) {
                    arrivals.add(new long[] {now, now - due});
                    came.incrementAndGet();
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Thread.sleep(3_000);
    }

    /** Returns how many messages the broker refused, as it does when it is busy. */
    static long send(DefaultMQProducer producer, String topic, int n, int rate, long due, long spread) throws Exception {
        Random chance = new Random(1);
        Semaphore unconfirmed = new Semaphore(2_000);
        AtomicLong failed = new AtomicLong();
        String rest = " " + "x".repeat(86);
        long begin = System.currentTimeMillis();
        for (int i = 0; i < n; i++) {
            while (rate > 0 && System.currentTimeMillis() < begin + i * 1_000L / rate) {
                Thread.sleep(2);
            }
            long now = System.currentTimeMillis();
            long at = due > 0 ? due + (spread > 0 ? chance.nextLong(spread) : 0) : now + 5_000 + chance.nextInt(5_000);
            Message message = new Message(topic, (at + rest).getBytes());
            message.setDeliverTimeMs(at);
            unconfirmed.acquire();
            producer.send(message, new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    unconfirmed.release();
                    if (result.getSendStatus() != SendStatus.SEND_OK) {
                        failed.incrementAndGet();
                    }
                }

                @Override
                public void onException(Throwable error) {
                    unconfirmed.release();
                    failed.incrementAndGet();
                }
            });
        }
        unconfirmed.acquire(2_000);
        return failed.get();
    }
}
