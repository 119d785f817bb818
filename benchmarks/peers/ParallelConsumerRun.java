import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.StringDeserializer;

/** Confluent Parallel Consumer in key mode: BOOTSTRAP GROUP TOPIC RECORDS CONCURRENCY SLEEP_MS. Prints a line of JSON. */
public class ParallelConsumerRun {
    public static void main(String[] arguments) throws Exception {
        String topic = arguments[2];
        long wanted = Long.parseLong(arguments[3]);
        int concurrency = Integer.parseInt(arguments[4]);
        long sleepMs = Long.parseLong(arguments[5]);
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", arguments[0]);
        settings.put("group.id", arguments[1]);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", false);
        KafkaConsumer<String, byte[]> consumer =
            new KafkaConsumer<>(settings, new StringDeserializer(), new ByteArrayDeserializer());
        ParallelConsumerOptions<String, byte[]> options = ParallelConsumerOptions.<String, byte[]>builder()
            .ordering(ParallelConsumerOptions.ProcessingOrder.KEY)
            .maxConcurrency(concurrency)
            .consumer(consumer)
            .build();
        AtomicLong done = new AtomicLong();
        AtomicLong began = new AtomicLong();
        AtomicLong ended = new AtomicLong();
        AtomicLong worked = new AtomicLong();
        com.sun.management.OperatingSystemMXBean machine =
            (com.sun.management.OperatingSystemMXBean) java.lang.management.ManagementFactory.getOperatingSystemMXBean();
        AtomicLong disordered = new AtomicLong();
        ConcurrentHashMap<String, Long> last = new ConcurrentHashMap<>();
        CountDownLatch finished = new CountDownLatch(1);
        ParallelStreamProcessor<String, byte[]> processor = ParallelStreamProcessor.createEosStreamProcessor(options);
        processor.subscribe(List.of(topic));
        processor.poll(context -> {
            if (began.get() == 0 && began.compareAndSet(0, System.nanoTime())) {
                worked.set(machine.getProcessCpuTime());
            }
            Long before = last.put(context.key(), context.offset());
            if (before != null && before >= context.offset()) {
                disordered.incrementAndGet();
            }
            try {
                Thread.sleep(sleepMs);
            } catch (InterruptedException interrupted) {
                throw new RuntimeException(interrupted);
            }
            if (done.incrementAndGet() == wanted) {
                ended.set(System.nanoTime());
                worked.set(machine.getProcessCpuTime() - worked.get());
                finished.countDown();
            }
        });
        boolean inTime = finished.await(300, TimeUnit.SECONDS);
        System.out.println("{\"seconds\": " + (ended.get() - began.get()) / 1e9 + ", \"disordered\": " + disordered.get()
            + ", \"cpu_seconds\": " + worked.get() / 1e9 + ", \"records\": " + done.get() + "}");
        System.out.flush();
        processor.closeDrainFirst();
        System.exit(inTime ? 0 : 1);
    }
}
