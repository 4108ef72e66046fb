import { once } from "node:events";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { key, sql } from "holdfast";
import { prometheus } from "holdfast/prometheus";
import { open } from "../database.ts";
import { command } from "../support.ts";

/** Made where the process starts: it counts from then on, whoever asks and however often. `locks` begin with zero. */
const metrics = prometheus({ labels: { service: "documents" }, locks: ["document"] });

/** Not for everybody: on an address that only the scraper reaches. */
async function serve(): Promise<{ url: string; close: () => void }> {
  const server = createServer(metrics.handler).listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  return { url: `http://127.0.0.1:${port}/metrics`, close: () => void server.close() };
}

export interface Result {
  readonly saved: number;
  readonly busy: number;
  /** As Prometheus would read them; those that are still zero are left out. */
  readonly scraped: Readonly<Record<string, number>>;
  /** Of documents, which are not labels. */
  readonly ids: number;
}

/** Of each of ten documents one editor saves, while a second one comes and is told that it is busy. */
export async function main(url: string): Promise<Result> {
  await using database = await open(url, {
    holdfast_example_metrics: "id int PRIMARY KEY, saves int NOT NULL",
  });
  const { hf, query } = database;
  // Where locks are rows, as on MySQL.
  await hf.migrate();
  const endpoint = await serve();
  try {
    let busy = 0;
    const save = (id: number) =>
      hf.transaction({ lock: key("document", id) }, async (tx) => {
        await tx.query(sql`INSERT INTO holdfast_example_metrics VALUES (${id}, 1)`);
        const second = await hf.tryLock(key("document", id), async () => {}, { separate: true });
        if (!second.acquired) busy++;
      });
    for (let id = 0; id < 10; id++) await save(id);
    const text = await (await fetch(endpoint.url)).text();
    const [row] = await query<{ saved: number }>(
      sql`SELECT sum(saves) AS saved FROM holdfast_example_metrics`,
    );
    return {
      saved: Number(row?.saved),
      busy,
      scraped: Object.fromEntries(
        text
          .split("\n")
          .filter((line) => /^holdfast_(transactions_total|locks_refused_total|lock_\w+_count)/.test(line))
          .filter((line) => !line.endsWith(" 0"))
          .map((line) => [
            line.slice(0, line.lastIndexOf(" ")),
            Number(line.slice(line.lastIndexOf(" ") + 1)),
          ]),
      ),
      ids: text.match(/document:\d/g)?.length ?? 0,
    };
  } finally {
    endpoint.close();
    metrics.stop();
  }
}

await command(import.meta.url, main, ({ saved, busy, scraped }) =>
  [
    `${saved} saved, ${busy} told that it is busy; and /metrics says`,
    ...Object.entries(scraped).map(([name, value]) => `  ${name} ${value}`),
  ].join("\n"),
);
