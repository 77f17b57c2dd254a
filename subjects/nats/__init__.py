"""The bus on NATS: one connection that never gives up, work-queues, key-value buckets and streams on JetStream."""
