/** `shards.settle`: records of `once` are found where their ids are routed to by now. */
import { placeOf, send } from "../batch/calls.ts";
import type { Connection } from "../seam/database.ts";
import { UnsupportedError } from "../seam/errors.ts";
import { type KeptRecord, type ReplayCopies, keyOfText } from "../seam/replay.ts";
import { type Address, type Instances, instancesOf } from "../shards/shards.ts";
import { contextOf } from "../transaction/scope.ts";

const call = "shards.settle";
const page = 500;

/**
 * Copies them there, and deletes none. So it can be killed, repeated, or run beside another map without losing a record. A copy
 * expires when its record does.
 */
export async function settleRecords(shards: object, signal: AbortSignal | undefined): Promise<void> {
  const instances = instancesOf(shards, call);
  for (const source of instances.all) {
    const others = instances.all.filter((each) => each !== source);
    for (let after: string | undefined, more = true; more;) {
      const records = await ask(source, signal, (copies, connection) => copies.list(connection, after, page));
      for (const target of others) {
        const some = records.filter(({ id }) => (homeOf(instances, id) ?? target) === target);
        if (some.length > 0) await ask(target, signal, (copies, connection) => copies.add(connection, some));
      }
      after = records.at(-1)?.id;
      more = records.length === page;
    }
  }
}

/** Undefined: it cannot be told from what is kept, or the route does not know it. Then all have it. */
function homeOf(instances: Instances, id: KeptRecord["id"]): object | undefined {
  const found = keyOfText(id);
  if (!found) return undefined;
  try {
    return instances.at(...(found.parts as Address));
  } catch {
    return undefined;
  }
}

function ask<T>(
  instance: object,
  signal: AbortSignal | undefined,
  work: (copies: ReplayCopies<Connection>, connection: Connection) => Promise<T>,
): Promise<T> {
  const context = contextOf(instance, call);
  const { copies } = context.database.engine.replay ?? {};
  if (!copies)
    throw new UnsupportedError(`${call}: records of once are not copied on ${context.database.engine.name}`);
  return send(
    context,
    placeOf(context, { separate: true, signal }, call),
    { names: ["once"] },
    (connection) => work(copies, connection),
  );
}
