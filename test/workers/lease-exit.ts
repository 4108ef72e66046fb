/** A program that ends without saying so to Holdfast: nothing of its leases must keep it. Run by itself. */
import { holdfast, key } from "holdfast";
import { backendNamed } from "../backends.ts";

const [, , backend = "", url = ""] = process.argv;
const [one, two] = [await backendNamed(backend).open(url), await backendNamed(backend).open(url)];
const [hf, other] = [holdfast(one.database), holdfast(two.database)];
const lease = await hf.lease(key("exit"));
// Long enough to be listening when it gives up.
await other.lease(key("exit"), { wait: 1500 }).catch((error: unknown) => console.log((error as Error).name));
await one.close();
await two.close();
console.log(`closed, fence ${lease.fence}`);
