/** One instance of the service, as cron wakes it. */
import { connect } from "../database.ts";
import { nightly, reconcile } from "./index.ts";

const [job = "", name = ""] = process.argv.slice(2);
const database = connect(process.env["DATABASE_URL"] ?? "");
const ran = await nightly(database.hf, job, (lease) => reconcile(database, name, lease));
await database[Symbol.asyncDispose]();
process.send?.(ran);
