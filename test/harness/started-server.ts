import { Client } from "pg";

export interface StartedServer {
  url: string;
  stop: () => Promise<void>;
}

/** One that can be ended in its own way, and started again with the same data at the same address. */
export interface RestartableServer extends StartedServer {
  restart(signal: NodeJS.Signals): Promise<void>;
}

export interface StartedCluster {
  /** The address of each node's maintenance database. */
  readonly urls: readonly string[];
  readonly stop: () => Promise<void>;
}

/** What is in front of a server has started when a statement comes back through it. */
export async function answersPg(url: string): Promise<void> {
  const client = new Client({ connectionString: url, connectionTimeoutMillis: 10_000 });
  client.on("error", () => {});
  await client.connect();
  try {
    await client.query("SELECT 1");
  } finally {
    await client.end();
  }
}
