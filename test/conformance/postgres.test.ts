import { conformanceOn } from "../harness/conformance.ts";

conformanceOn("postgres", "postgresOld");
