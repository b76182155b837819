"""A running Spark application as seen from outside: its event log, and the REST API of its UI on loopback."""

import json
from urllib.error import URLError
from urllib.request import urlopen

from tests.standalone import free_port


class Application:
    """What the next spark-submit with the properties of `properties()` does, by Spark's own account."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        folder.mkdir()

    def properties(self):
        """For tests.standalone.cluster_properties."""
        return {
            "spark__ui__enabled": "true",
            "spark__ui__port": str(self.port),
            "spark__ui__liveUpdate__period": "0",
            "spark__eventLog__enabled": "true",
            "spark__eventLog__dir": self.folder.as_uri(),
            "spark__eventLog__rolling__enabled": "false",
            "spark__eventLog__compress": "false",
        }

    def events(self):
        """The event log up to its last whole line. Starts of jobs are there at once, those of tasks later."""
        return [json.loads(line) for file in self.folder.iterdir() for line in file.read_text("utf-8").split("\n")[:-1]]

    def stages(self, operator):
        """The ids of the stages that have run, or will, an operator of Spark's physical plans, such as MapInArrow."""
        return {
            stage["Stage ID"]
            for event in self.events()
            if event["Event"] == "SparkListenerJobStart"
            for stage in event["Stage Infos"]
            if any(json.loads(rdd.get("Scope", "{}")).get("name") == operator for rdd in stage["RDD Info"])
        }

    def running_tasks(self, operator):
        """(task id, executor id) of the tasks of these stages that run at this moment."""
        return {
            (task["taskId"], task["executorId"])
            for stage in self.stages(operator)
            for attempt in self._ask(f"stages/{stage}?details=false")
            if attempt["numActiveTasks"]
            for task in self._ask(f"stages/{stage}/{attempt['attemptId']}/taskList?status=running")
        }

    def _ask(self, path):
        """The answer of the REST API; nothing while there is no UI or it does not know the stage yet."""
        base = f"http://127.0.0.1:{self.port}/api/v1/applications"
        try:
            with urlopen(base, timeout=60) as answer:
                (application,) = json.load(answer)
            with urlopen(f"{base}/{application['id']}/{path}", timeout=60) as answer:
                return json.load(answer)
        except (URLError, ValueError):
            return []

    def lost_tasks(self, operator):
        """(stage, partition) of its tasks that ended with their executor, and of those that succeeded after that."""
        lost, again, stages = set(), set(), self.stages(operator)
        for event in self.events():
            if event["Event"] == "SparkListenerTaskEnd" and event["Stage ID"] in stages:
                task = (event["Stage ID"], event["Task Info"]["Index"])
                reason = event["Task End Reason"]["Reason"]
                if reason == "ExecutorLostFailure":
                    lost.add(task)
                elif reason == "Success" and task in lost:
                    again.add(task)
        return lost, again
