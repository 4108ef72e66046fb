import type { Holder } from "../../seam/errors.ts";
import type { LockView } from "../../seam/inspect.ts";
import type { LockRequest } from "../../seam/key.ts";
import type { KeyHolding } from "./in-process-locks.ts";
import type { DuckdbConnection } from "./dialect.ts";
import { leases } from "./leases.ts";

/** Whoever holds a lock through Holdfast is in this process. A caller's own transaction that has joined is not seen. */
export async function holders(
  connection: DuckdbConnection,
  locks: readonly LockRequest[],
): Promise<readonly Holder[]> {
  const inProcess = await connection.inProcess;
  return locks.flatMap(({ key }) => {
    const holding = inProcess.holderOf(key.id);
    if (!holding) return [];
    return [
      {
        pid: process.pid,
        application: holding.name,
        state: `connection ${inProcess.number(holding.session)}`,
        since: holding.since,
      },
    ];
  });
}

export async function inspect(connection: DuckdbConnection): Promise<LockView[]> {
  const inProcess = await connection.inProcess;
  const view = ({ session, id, name, since }: KeyHolding, granted: boolean): LockView => {
    const holder = inProcess.holderOf(id);
    return {
      kind: "lock row",
      name: name || id,
      mode: "exclusive",
      granted,
      session: {
        id: `connection ${inProcess.number(session)}`,
        application: `process ${process.pid}`,
        state: granted ? "active" : "waiting",
        since,
      },
      waitingMs: granted ? undefined : Date.now() - since.getTime(),
      blockedBy: granted || !holder ? [] : [`connection ${inProcess.number(holder.session)}`],
    };
  };
  const entries = await leases.list(connection, {});
  return [
    ...inProcess.holdings.map((holding) => view(holding, true)),
    ...[...inProcess.waiting]
      .filter(({ id }) => inProcess.holderOf(id))
      .map((holding) => view(holding, false)),
    ...entries.map((entry): LockView => {
      const { name, holder, fence, mode, waiting, since } = entry;
      const inTheWay = entries.filter((other) => !other.waiting && other.name === name && other !== entry);
      return {
        kind: "lease",
        name,
        mode: `${mode}, fence ${fence}`,
        granted: !waiting,
        session: { id: holder, application: "", state: waiting ? "waiting" : "holding", since },
        waitingMs: waiting ? Math.max(0, Date.now() - since.getTime()) : undefined,
        blockedBy: waiting ? [...new Set(inTheWay.map((other) => other.holder))] : [],
      };
    }),
  ];
}
