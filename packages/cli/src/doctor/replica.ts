/** A server that takes writes although another one feeds it by replication. */
import type { Server } from "../server.ts";
import type { Finding } from "./check.ts";

export async function writableReplica({ hf }: Pick<Server, "hf">): Promise<readonly Finding[]> {
  // Another check says why Holdfast refuses the server altogether.
  const primary = await hf.capabilities().then(
    (capabilities) => capabilities.primary,
    () => true as const,
  );
  if (primary === true) return [];
  return [
    {
      severity: "error",
      what: `the server takes writes, but ${primary.why}`,
      why: "Both servers grant the same lock and the same quota. Holdfast refuses it (HF_REPLICA).",
      fix: "Connect to the server that it replicates from, and make this one read-only.\nIf every process that locks or counts connects to this server: holdfast(…, { acceptReplica: true })",
    },
  ];
}
